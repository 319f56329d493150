//! One request of a soak: what it asks, how its client behaves, what it saw. Owner: the client that sends it. Invariant:
//! everything follows from seed and number; whatever an answer looks like that should not is a fault, not a panic.

use crate::raw_client::{Answer, CHAT, Connection, TEXT, request};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;
use tokenrouter_core::rng::mix;

/// Longest wait for a byte of an answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// What clients saw, added up.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Answers by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Choices seen to their end, by reason.
    pub finished: BTreeMap<String, u64>,
    /// Requests whose client left.
    pub cut: u64,
    /// Their choices.
    pub cut_choices: u64,
    /// What should not have been.
    pub faults: Vec<String>,
}

impl Ledger {
    /// Adds another one.
    pub fn add(&mut self, other: Ledger) {
        other.statuses.into_iter().for_each(|(status, count)| *self.statuses.entry(status).or_default() += count);
        other.finished.into_iter().for_each(|(reason, count)| *self.finished.entry(reason).or_default() += count);
        self.cut += other.cut;
        self.cut_choices += other.cut_choices;
        self.faults.extend(other.faults);
    }
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Reads the answer.
    Reads,
    /// Reads it a little at a time.
    ReadsSlowly,
    /// Leaves after this time and in one of three ways.
    Leaves { after: Duration, how: u64 },
    /// Sends no more than this share of its bytes, in 256ths, and leaves.
    SendsPart(usize),
}

/// A request.
#[derive(Clone, Debug)]
pub struct Wish {
    method: &'static str,
    path: &'static str,
    body: String,
    choices: u64,
    expected: u16,
    manner: Manner,
}

/// Numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % bound
    }

    fn one_of<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize].clone()
    }
}

impl Wish {
    /// The request of this number.
    pub fn number(seed: u64, number: u64) -> Wish {
        let mut dice = Dice(mix(seed ^ mix(number)));
        match dice.below(100) {
            0..8 => wrong(&mut dice),
            8..20 => {
                let wish = good(&mut dice);
                let manner = match dice.below(4) {
                    0 => Manner::SendsPart(dice.below(256) as usize),
                    _ => Manner::Leaves { after: Duration::from_millis(dice.below(40)), how: dice.below(3) },
                };
                Wish { manner, ..wish }
            }
            20..24 => Wish { manner: Manner::ReadsSlowly, ..good(&mut dice) },
            _ => good(&mut dice),
        }
    }

    /// Sends it and behaves as it should.
    pub fn play(&self, address: SocketAddr) -> Ledger {
        let bytes = request(self.method, self.path, &self.body);
        match self.manner {
            Manner::Reads => {
                let mut connection = Connection::open(address);
                connection.send(&bytes);
                match connection.try_answer() {
                    Ok(answer) => self.judge(&answer),
                    Err(error) => self.fault(&error.to_string()),
                }
            }
            Manner::ReadsSlowly => {
                let head = "HTTP/1.1\r\n";
                let closing =
                    String::from_utf8_lossy(&bytes).replacen(head, &format!("{head}connection: close\r\n"), 1);
                match read_slowly(address, closing.as_bytes()) {
                    Ok(text) => self.skim(&text),
                    Err(error) => self.fault(&error.to_string()),
                }
            }
            Manner::Leaves { after, how } => {
                // Whatever becomes of a connection that is left is right.
                let _ = leave(address, &bytes, (after, how));
                self.left()
            }
            Manner::SendsPart(share) => {
                let _ = leave(address, &bytes[..bytes.len() * share / 256], (Duration::ZERO, 0));
                self.left()
            }
        }
    }

    fn left(&self) -> Ledger {
        Ledger { cut: 1, cut_choices: self.choices, ..Ledger::default() }
    }

    fn fault(&self, what: &str) -> Ledger {
        Ledger { faults: vec![format!("{what}: {self:?}")], ..Ledger::default() }
    }

    /// What an answer says of its choices, by its bytes.
    fn skim(&self, text: &str) -> Ledger {
        if !text.starts_with("HTTP/1.1 200 ") {
            return self.fault(text);
        }
        let of = |reason: &str| text.matches(&format!("\"finish_reason\":\"{reason}\"")).count() as u64;
        let finished = BTreeMap::from(["stop", "length"].map(|reason| (reason.to_owned(), of(reason))));
        match finished.values().sum::<u64>() == self.choices {
            true => Ledger { statuses: [(200, 1)].into(), finished, ..Ledger::default() },
            false => self.fault(&format!("{finished:?} of {} choices", self.choices)),
        }
    }

    /// What an answer says of its choices.
    fn judge(&self, answer: &Answer) -> Ledger {
        let mut ledger = Ledger { statuses: [(answer.status, 1)].into(), ..Ledger::default() };
        if answer.status != self.expected {
            ledger.faults.push(format!("{} instead of {}: {self:?}: {}", answer.status, self.expected, answer.text));
            return ledger;
        }
        if answer.status != 200 || self.choices == 0 {
            return ledger;
        }
        let streamed = answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        let parts = if streamed { answer.events() } else { vec![answer.json()] };
        for choice in parts.iter().flat_map(|part| part["choices"].as_array().into_iter().flatten()) {
            if let Some(reason) = choice["finish_reason"].as_str() {
                *ledger.finished.entry(reason.to_owned()).or_default() += 1;
            }
        }
        if ledger.finished.values().sum::<u64>() != self.choices {
            ledger.faults.push(format!("{:?} of {} choices: {self:?}", ledger.finished, self.choices));
        }
        ledger
    }
}

/// A request that is answered.
fn good(dice: &mut Dice) -> Wish {
    let (model, choices) = (dice.one_of(&["demo", "demo", "demo", "small", "large"]), dice.one_of(&[1, 1, 1, 2, 3]));
    let (chat, stream) = (dice.below(3) == 0, dice.below(2) == 0);
    let mut body = json!({"model": model, "n": choices, "stream": stream, "max_tokens": 1 + dice.below(60),
        "seed": dice.below(1000), "temperature": dice.one_of(&[0.0, 0.7, 1.0])});
    if stream && dice.below(2) == 0 {
        body["stream_options"] = json!({"include_usage": true});
    }
    if dice.below(4) == 0 {
        body["stop"] = dice.one_of(&[json!("."), json!(["\n", "8"]), json!(["never said by anybody"])]);
    }
    let problem = format!("Emma has {} roses and buys {} more. How many?", dice.below(1000), dice.below(1000));
    if chat {
        body["messages"] = json!([{"role": "user", "content": problem}]);
        if dice.below(4) == 0 {
            (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(dice.below(20)));
        }
        if dice.below(6) == 0 {
            let properties = json!({"a": {"type": "integer", "maximum": dice.below(20)}, "b": {"enum": ["x", "y"]}});
            let schema =
                json!({"type": "object", "properties": properties, "required": ["b"], "additionalProperties": false});
            body["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        }
    } else {
        let long = dice.below(300);
        let ids: Vec<u64> = (0..long).map(|_| dice.below(600)).collect();
        body["prompt"] = if long > 200 { json!(ids) } else { json!(problem) };
        if dice.below(4) == 0 {
            (body["logprobs"], body["echo"]) = (json!(dice.below(6)), json!(dice.below(2) == 0));
        }
    }
    let path = if chat { CHAT } else { TEXT };
    Wish { method: "POST", path, body: body.to_string(), choices, expected: 200, manner: Manner::Reads }
}

/// A request that is refused.
fn wrong(dice: &mut Dice) -> Wish {
    let text = |more: Value| {
        let mut body = json!({"model": "demo", "prompt": "hi", "max_tokens": 4});
        body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        body.to_string()
    };
    let long: Vec<u32> = vec![5; 600];
    let (method, path, body, expected) = match dice.below(9) {
        0 => ("POST", TEXT, "{\"model\": ".to_owned(), 400),
        1 => ("POST", TEXT, text(json!({"model": "nobody"})), 404),
        2 => ("POST", TEXT, text(json!({"temperatur": 1})), 400),
        3 => ("POST", TEXT, text(json!({"prompt": long})), 400),
        4 => ("POST", TEXT, text(json!({"prompt": long, "stream": true})), 400),
        5 => ("POST", TEXT, text(json!({"prompt": [1, 2, 99_999]})), 400),
        6 => ("POST", CHAT, json!({"model": "demo", "messages": []}).to_string(), 400),
        7 => ("GET", "/nowhere", String::new(), 404),
        _ => ("DELETE", CHAT, String::new(), 405),
    };
    Wish { method, path, body, choices: 0, expected, manner: Manner::Reads }
}

fn connect(address: SocketAddr, bytes: &[u8]) -> std::io::Result<TcpStream> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.write_all(bytes)?;
    Ok(socket)
}

/// Reads an answer in small pieces until the server closes.
#[allow(clippy::disallowed_methods, reason = "a slow reader waits in a thread of its own")]
fn read_slowly(address: SocketAddr, bytes: &[u8]) -> std::io::Result<String> {
    let mut socket = connect(address, bytes)?;
    let (mut seen, mut piece) = (Vec::new(), [0; 512]);
    loop {
        match socket.read(&mut piece)? {
            0 => return Ok(String::from_utf8_lossy(&seen).into_owned()),
            count => seen.extend_from_slice(&piece[..count]),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Sends bytes and leaves: by closing (a reset when bytes of an answer are unread), after a first look at the answer, or by
/// closing one side first.
#[allow(clippy::disallowed_methods, reason = "a client that leaves later waits in a thread of its own")]
fn leave(address: SocketAddr, bytes: &[u8], (after, how): (Duration, u64)) -> std::io::Result<()> {
    let mut socket = connect(address, bytes)?;
    std::thread::sleep(after);
    match how {
        0 => {}
        1 => drop(socket.read(&mut [0; 100])?),
        _ => {
            socket.shutdown(Shutdown::Write)?;
            std::thread::sleep(after);
        }
    }
    Ok(())
}
