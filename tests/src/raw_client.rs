//! HTTP by hand: requests as bytes on a socket, answers read to their end and checked for their form. Owner: the tests.
//! Invariant: nothing waits longer than [`PATIENCE`].

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest wait for a byte.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Text completions.
pub const TEXT: &str = "/v1/completions";
/// Chat.
pub const CHAT: &str = "/v1/chat/completions";

/// A request as bytes; the connection stays open after it.
pub fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
    format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Sends a body and reads the answer, on a connection of its own.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    let mut connection = Connection::open(address);
    connection.send(&request("POST", path, &body.to_string()));
    connection.answer()
}

/// Reads a route, on a connection of its own.
pub fn get(address: SocketAddr, path: &str) -> Answer {
    let mut connection = Connection::open(address);
    connection.send(&request("GET", path, ""));
    connection.answer()
}

/// A connection to the server.
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects.
    ///
    /// # Panics
    /// When nobody listens: a failed test.
    pub fn open(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).expect("the server listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("the option exists");
        socket.set_nodelay(true).expect("the option exists");
        Connection(BufReader::new(socket))
    }

    /// Sends bytes.
    ///
    /// # Panics
    /// When the server does not take them: a failed test.
    pub fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).expect("the server takes the bytes");
    }

    /// The next answer.
    ///
    /// # Panics
    /// When there is none or it has a wrong form: a failed test.
    pub fn answer(&mut self) -> Answer {
        self.try_answer().expect("an answer")
    }

    /// The next answer, or why there is none.
    ///
    /// # Errors
    /// When the connection ends before the answer does.
    pub fn try_answer(&mut self) -> io::Result<Answer> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.0.read_line(&mut head)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let mut answer = Answer { status: status.expect("a status"), head, text: String::new() };
        let body = match answer.header("transfer-encoding") {
            Some("chunked") => self.chunks()?,
            _ => {
                let length = answer.header("content-length").map_or(0, |length| length.parse().expect("a length"));
                let mut body = vec![0; length];
                self.0.read_exact(&mut body)?;
                body
            }
        };
        answer.text = String::from_utf8(body).expect("a body in UTF-8");
        Ok(answer)
    }

    fn chunks(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line)?;
            let Ok(size) = usize::from_str_radix(line.trim_end(), 16) else {
                return Err(io::Error::other(format!("{line:?} instead of the size of a chunk")));
            };
            let start = body.len();
            body.resize(start + size + 2, 0);
            self.0.read_exact(&mut body[start..])?;
            assert_eq!(&body[start + size..], b"\r\n", "the end of a chunk");
            body.truncate(start + size);
            if size == 0 {
                return Ok(body);
            }
        }
    }

    /// Reads lines until one has these words.
    ///
    /// # Panics
    /// When the connection ends before: a failed test.
    pub fn read_until(&mut self, words: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(words) {
            let read = self.0.read_line(&mut seen).expect("an open connection");
            assert!(read > 0, "the server closed after {seen:?}");
        }
        seen
    }

    /// What is left of a stream that [`Self::read_until`] has begun, chunk sizes included.
    ///
    /// # Panics
    /// When it does not end with `[DONE]`: a failed test.
    pub fn rest_of_stream(&mut self) -> String {
        self.read_until("data: [DONE]")
    }

    /// Reads until the server has closed its side, or the connection is gone.
    ///
    /// # Panics
    /// When nothing comes for [`PATIENCE`]: a failed test.
    pub fn read_to_end(&mut self) {
        if let Err(error) = self.0.read_to_end(&mut Vec::new()) {
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
        }
    }

    /// Waits until the server has closed its side.
    ///
    /// # Panics
    /// When it sends more or leaves the connection open: a failed test.
    pub fn expect_closed(&mut self) {
        match self.0.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => panic!("more bytes came"),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    head: String,
    /// Its body.
    pub text: String,
}

impl Answer {
    /// A header by its lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none: a failed test.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The error object.
    ///
    /// # Panics
    /// When the body is none of the form of the contract: a failed test.
    pub fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        for member in ["message", "type", "param", "code"] {
            assert!(error.get(member).is_some(), "{member} is missing in {}", self.text);
        }
        error
    }

    /// The events of a stream without the last, which must be `[DONE]`.
    ///
    /// # Panics
    /// When it is no stream of the form of the contract: a failed test.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        let events = self.text.strip_suffix("\n\n").unwrap_or_else(|| panic!("cut short: {:?}", self.text));
        let mut data: Vec<&str> = events.split("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(data.pop(), Some("data: [DONE]"), "{}", self.text);
        let event = |event: &str| {
            let json = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no event: {event:?}"));
            serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"))
        };
        data.into_iter().map(event).collect()
    }

    /// The answer as one choice, whether it was streamed or not.
    ///
    /// # Panics
    /// When it has not exactly one choice or is no answer: a failed test.
    pub fn said(&self) -> Said {
        assert_eq!(self.status, 200, "{}", self.text);
        if self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
            return Said::of_events(&self.events());
        }
        let json = self.json();
        assert_eq!(json["choices"].as_array().map(Vec::len), Some(1), "{json}");
        Said::of(&json["choices"][0], &json["usage"])
    }
}

/// What one choice says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// The text.
    pub text: String,
    /// Why it ended.
    pub finish: String,
    /// The stop that ended it.
    pub stop: Value,
    /// Entries of the log-probabilities: names of tokens for text, objects for chat.
    pub entries: Vec<Value>,
    /// The usage, null when it was not asked for.
    pub usage: Value,
    /// The pieces of a stream that have text.
    pub parts: Vec<String>,
}

impl Said {
    fn of(choice: &Value, usage: &Value) -> Said {
        let text = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
        let entries = [&choice["logprobs"]["tokens"], &choice["logprobs"]["content"]];
        Said {
            text: text.iter().find_map(|text| text.as_str()).unwrap_or_default().to_owned(),
            finish: choice["finish_reason"].as_str().unwrap_or_default().to_owned(),
            stop: choice["stop_reason"].clone(),
            entries: entries.iter().find_map(|list| list.as_array().cloned()).unwrap_or_default(),
            usage: usage.clone(),
            parts: Vec::new(),
        }
    }

    fn of_events(events: &[Value]) -> Said {
        let mut whole = Said::default();
        for event in events {
            let part = Said::of(&event["choices"][0], &event["usage"]);
            whole.text.push_str(&part.text);
            whole.entries.extend(part.entries);
            if !part.text.is_empty() {
                whole.parts.push(part.text);
            }
            if !part.finish.is_empty() {
                assert_eq!(whole.finish, "", "a choice ends once");
                (whole.finish, whole.stop) = (part.finish, part.stop);
            }
            if !part.usage.is_null() {
                whole.usage = part.usage;
            }
        }
        whole
    }

    /// Without what may differ between two answers to the same request: the pieces of a stream and what of the prompt was
    /// found in the cache.
    pub fn comparable(mut self) -> Said {
        self.parts.clear();
        if let Some(usage) = self.usage.as_object_mut() {
            usage.remove("prompt_tokens_details");
        }
        self
    }

    /// Tokens generated.
    pub fn completion_tokens(&self) -> u64 {
        self.usage["completion_tokens"].as_u64().unwrap_or_else(|| panic!("no usage: {self:?}"))
    }
}
