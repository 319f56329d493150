//! What a stream says is what a whole answer says, and both are what the definition says: text, stop strings, ends, usage
//! and tokens, over random bytes, cut at random places, hopping between two models. Owner: the HTTP layer.

use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use tokenrouter_core::rng::mix;
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{CHAT, TEXT, post};
use tokenrouter_tests::scripted::script;

const CASES: u64 = 1000;
const USERS: u64 = 8;

/// Draws from one seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % bound
    }

    fn one_of<'a>(&mut self, list: &[&'a [u8]]) -> &'a [u8] {
        list[self.below(list.len() as u64) as usize]
    }
}

/// One request and what must come of it.
#[derive(Debug)]
struct Case {
    said: Vec<u8>,
    stops: Vec<String>,
    include_stop: bool,
    max_tokens: usize,
    model: &'static str,
    chat: bool,
}

/// Text, reason, stop string, tokens.
type Outcome = (String, &'static str, Option<String>, usize);

impl Case {
    fn draw(random: &mut Random) -> Case {
        let pieces: [&[u8]; 10] =
            [b"a", b"b", b"ab", "é".as_bytes(), "기".as_bytes(), "😀".as_bytes(), b" ", b"\xF0\x9F", b"\xFF", b"\"\n"];
        let chat = random.below(3) == 0;
        let count = random.below(20);
        let mut said: Vec<u8> = (0..count).flat_map(|_| random.one_of(&pieces).iter().copied()).collect();
        if chat {
            // A chat is text, and this server's template trims it.
            said = String::from_utf8_lossy(&said).trim().to_owned().into_bytes();
        }
        let stop = |random: &mut Random| {
            let bytes: Vec<u8> = (0..1 + random.below(3)).flat_map(|_| random.one_of(&pieces[..7]).to_vec()).collect();
            String::from_utf8(bytes).expect("the first pieces are text")
        };
        Case {
            stops: (0..random.below(4)).map(|_| stop(random)).collect(),
            include_stop: random.below(2) == 0,
            max_tokens: 1 + random.below(said.len() as u64 + 4) as usize,
            model: ["pair", "pair", "small", "large"][random.below(4) as usize],
            chat,
            said,
        }
    }

    fn body(&self) -> Value {
        let mut body = json!({"model": self.model, "temperature": 0, "stop": self.stops,
            "include_stop_str_in_output": self.include_stop, "max_tokens": self.max_tokens, "seed": 3});
        if self.chat {
            let text = format!("{}\0", String::from_utf8_lossy(&self.said));
            body["messages"] = json!([{"role": "user", "content": text}]);
            body["logprobs"] = json!(true);
        } else {
            body["prompt"] = json!(script(&self.said));
            body["logprobs"] = json!(0);
        }
        body
    }

    /// The definition: tokens come one by one; the one that completes a stop string in the text so far is the last.
    fn outcome(&self) -> Outcome {
        for tokens in 1..=self.max_tokens.min(self.said.len()) {
            let text = String::from_utf8_lossy(&self.said[..tokens]);
            let found =
                |(index, stop): (usize, &String)| text.find(stop.as_str()).map(|at| (at + stop.len(), index, at));
            if let Some((end, index, at)) = self.stops.iter().enumerate().filter_map(found).min() {
                let keep = if self.include_stop { end } else { at };
                return (text[..keep].to_owned(), "stop", Some(self.stops[index].clone()), tokens);
            }
        }
        if self.max_tokens > self.said.len() {
            return (String::from_utf8_lossy(&self.said).into_owned(), "stop", None, self.said.len() + 1);
        }
        let cut = String::from_utf8_lossy(&self.said[..self.max_tokens]).into_owned();
        (cut, "length", None, self.max_tokens)
    }

    fn check(&self, address: SocketAddr) {
        let path = if self.chat { CHAT } else { TEXT };
        let mut body = self.body();
        let whole = post(address, path, &body).said();
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let streamed = post(address, path, &body).said();
        assert_eq!(streamed.parts.concat(), streamed.text);
        assert_eq!(streamed.comparable(), whole.clone().comparable(), "{self:?}");
        let (text, finish, stop, tokens) = self.outcome();
        assert_eq!(
            (whole.text.as_str(), whole.finish.as_str(), &whole.stop),
            (text.as_str(), finish, &json!(stop)),
            "{self:?}"
        );
        assert_eq!((whole.completion_tokens(), whole.entries.len()), (tokens as u64, tokens), "{self:?}");
        if self.chat {
            let bytes = whole.entries.iter().filter_map(|entry| entry["bytes"][0].as_u64());
            let due = self.said.iter().map(|&byte| u64::from(byte)).chain([u64::from(b'<')]).take(tokens);
            assert!(bytes.eq(due), "{self:?}");
        }
    }
}

#[test]
fn a_thousand_streams_are_their_whole_answers_and_what_the_definition_says() {
    let server = Server::start(Setup::parrots());
    let address = server.address;
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..USERS {
            scope.spawn(|| {
                loop {
                    let case = next.fetch_add(1, Ordering::Relaxed);
                    if case >= CASES {
                        break;
                    }
                    Case::draw(&mut Random(mix(seed ^ mix(case)))).check(address);
                }
            });
        }
    });
    server.stop();
}
