//! Spans as OTLP's protobuf (opentelemetry-proto v1, `ExportTraceServiceRequest`). Owner: the exporter. Invariant: field
//! numbers are those of the protocol; what is empty or zero is left out, as protobuf does.

use std::borrow::Cow;

/// A value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A text.
    Text(String),
    /// A whole number.
    Int(i64),
    /// A number.
    Real(f64),
    /// Several texts.
    Texts(Vec<String>),
}

/// A name and its value.
pub type Attribute = (Cow<'static, str>, Value);

/// Something that happened in a span.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanEvent {
    /// Unix time in nanoseconds.
    pub at: u64,
    /// What.
    pub name: &'static str,
    /// More of it.
    pub attributes: Vec<Attribute>,
}

/// A span that has ended, of kind `SERVER`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// Of the trace.
    pub trace: [u8; 16],
    /// Of the span.
    pub id: [u8; 8],
    /// Of the span that asked for it.
    pub parent: Option<[u8; 8]>,
    /// What came with the parent and goes on with its children.
    pub state: String,
    /// What is done.
    pub name: String,
    /// Unix time in nanoseconds.
    pub began: u64,
    /// Unix time in nanoseconds.
    pub ended: u64,
    /// More of it.
    pub attributes: Vec<Attribute>,
    /// What happened.
    pub events: Vec<SpanEvent>,
    /// Events that found no room.
    pub events_dropped: u32,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// `SPAN_KIND_SERVER`.
const KIND_SERVER: u64 = 2;
/// `STATUS_CODE_ERROR`.
const STATUS_ERROR: u64 = 2;

/// A protobuf message that is being written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value as u8 & 0x7f) | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: u32) {
        self.raw(u64::from(field << 3 | wire));
    }

    fn number(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.key(field, 0);
            self.raw(value);
        }
    }

    fn fixed(&mut self, field: u32, value: u64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.raw(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn text(&mut self, field: u32, value: &str) {
        if !value.is_empty() {
            self.bytes(field, value.as_bytes());
        }
    }

    fn inner(&mut self, field: u32, write: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        write(&mut inner);
        self.bytes(field, &inner.0);
    }

    /// `AnyValue`: which member is set says what it is, so zero and the empty text are written too.
    fn value(&mut self, value: &Value) {
        match value {
            Value::Text(text) => self.bytes(1, text.as_bytes()),
            Value::Int(number) => {
                self.key(3, 0);
                self.raw(number.cast_unsigned());
            }
            Value::Real(number) => self.fixed(4, number.to_bits()),
            Value::Texts(texts) => self.inner(5, |array| {
                texts.iter().for_each(|text| array.inner(1, |value| value.bytes(1, text.as_bytes())));
            }),
        }
    }

    fn attributes(&mut self, field: u32, attributes: &[Attribute]) {
        for (key, value) in attributes {
            self.inner(field, |pair| {
                pair.text(1, key);
                pair.inner(2, |message| message.value(value));
            });
        }
    }

    fn span(&mut self, span: &Span) {
        self.bytes(1, &span.trace);
        self.bytes(2, &span.id);
        self.text(3, &span.state);
        if let Some(parent) = &span.parent {
            self.bytes(4, parent);
        }
        self.text(5, &span.name);
        self.number(6, KIND_SERVER);
        self.fixed(7, span.began);
        self.fixed(8, span.ended);
        self.attributes(9, &span.attributes);
        for event in &span.events {
            self.inner(11, |message| {
                message.fixed(1, event.at);
                message.text(2, event.name);
                message.attributes(3, &event.attributes);
            });
        }
        self.number(12, span.events_dropped.into());
        if let Some(error) = &span.error {
            self.inner(15, |status| {
                status.text(2, error);
                status.number(3, STATUS_ERROR);
            });
        }
    }
}

/// A request to a collector.
pub fn encode(resource: &[Attribute], spans: &[Span]) -> Vec<u8> {
    let mut request = Message::default();
    request.inner(1, |group| {
        group.inner(1, |message| message.attributes(1, resource));
        group.inner(2, |scope| {
            scope.inner(1, |named| {
                named.text(1, env!("CARGO_PKG_NAME"));
                named.text(2, env!("CARGO_PKG_VERSION"));
            });
            spans.iter().for_each(|span| scope.inner(2, |message| message.span(span)));
        });
    });
    request.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The members of a message: field number, wire type, and the number or the bytes.
    fn members(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>, u64)> {
        fn varint(bytes: &mut &[u8]) -> u64 {
            let len = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
            let value = bytes[..len].iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f));
            *bytes = &bytes[len..];
            value
        }
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let (data, number) = match key & 7 {
                0 => (Vec::new(), varint(&mut bytes)),
                wire => {
                    let len = if wire == 1 { 8 } else { varint(&mut bytes) as usize };
                    let data = bytes[..len].to_vec();
                    bytes = &bytes[len..];
                    (data, 0)
                }
            };
            found.push((key >> 3, data, number));
        }
        found
    }

    fn only(bytes: &[u8], field: u64) -> Vec<u8> {
        let mut found = members(bytes).into_iter().filter(|member| member.0 == field);
        let first = found.next().unwrap_or_else(|| panic!("field {field} is missing")).1;
        assert!(found.next().is_none(), "field {field} comes twice");
        first
    }

    #[test]
    fn a_span_has_the_fields_of_the_protocol() {
        let span = Span {
            trace: [7; 16],
            id: [8; 8],
            parent: Some([9; 8]),
            name: "chat demo".to_owned(),
            began: 1_700_000_000_000_000_000,
            ended: 1_700_000_000_300_000_000,
            attributes: vec![
                ("a".into(), Value::Int(-1)),
                ("b".into(), Value::Int(300)),
                ("c".into(), Value::Real(0.5)),
            ],
            events: vec![SpanEvent { at: 5, name: "hop", attributes: vec![("to".into(), Value::Text(String::new()))] }],
            events_dropped: 200,
            error: Some("it failed".to_owned()),
            ..Span::default()
        };
        let request = encode(&[("service.name".into(), Value::Text("x".to_owned()))], &[span.clone(), span]);
        let group = only(&request, 1);
        assert_eq!(only(&only(&only(&only(&group, 1), 1), 2), 1), b"x");
        let scope = only(&group, 2);
        assert_eq!(only(&only(&scope, 1), 1), b"tokenrouter");
        let spans: Vec<_> = members(&scope).into_iter().filter(|member| member.0 == 2).collect();
        assert_eq!((spans.len(), &spans[0]), (2, &spans[1]));
        let span = &spans[0].1;
        let found = members(span);
        let fields: Vec<u64> = found.iter().map(|member| member.0).collect();
        assert_eq!(fields, [1, 2, 4, 5, 6, 7, 8, 9, 9, 9, 11, 12, 15], "trace_state is empty and left out");
        assert_eq!((only(span, 1), only(span, 2), only(span, 4)), (vec![7; 16], vec![8; 8], vec![9; 8]));
        assert_eq!((found[4].2, found[11].2), (2, 200));
        assert_eq!(only(span, 8), 1_700_000_000_300_000_000u64.to_le_bytes());
        let numbers: Vec<u64> = found[7..9].iter().map(|member| members(&only(&member.1, 2))[0].2).collect();
        assert_eq!(numbers, [u64::MAX, 300]);
        assert_eq!(only(&only(&found[9].1, 2), 4), 0.5f64.to_le_bytes());
        let event = only(span, 11);
        assert_eq!((only(&event, 1), only(&event, 2)), (5u64.to_le_bytes().to_vec(), b"hop".to_vec()));
        assert_eq!(only(&only(&only(&event, 3), 2), 1), b"", "an empty text is a text");
        let status = only(span, 15);
        assert_eq!((only(&status, 2), members(&status)[1].2), (b"it failed".to_vec(), 2));
    }
}
