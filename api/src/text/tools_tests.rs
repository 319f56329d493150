//! Answers that hold calls, cut into pieces anywhere; and the grammars they come from.

use super::super::Grammars;
use super::*;
use crate::http::testing::ByteCodec;
use tokenrouter_core::constraint::ConstraintSpec;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::mix;

/// All that a reader says of an answer in these pieces: the text, and name and arguments of each call.
fn read<'a>(dialect: ToolDialect, pieces: impl IntoIterator<Item = &'a str>) -> (String, Vec<(String, String)>, bool) {
    read_demanded(dialect, FREE, pieces)
}

fn read_demanded<'a>(
    dialect: ToolDialect,
    demand: Demand,
    pieces: impl IntoIterator<Item = &'a str>,
) -> (String, Vec<(String, String)>, bool) {
    let mut reader = CallReader::new(dialect, demand);
    let (mut text, mut calls) = (String::new(), Vec::new());
    let mut add = |said: Said| {
        text.push_str(&said.text);
        for part in said.calls {
            assert_eq!(part.name.is_some(), part.index == calls.len(), "a name comes once and first");
            if let Some(name) = part.name {
                calls.push((name, String::new()));
            }
            calls[part.index].1.push_str(&part.arguments);
        }
    };
    for piece in pieces {
        add(reader.push(piece));
    }
    add(reader.finish());
    assert_eq!(reader.calls(), calls.len());
    (text, calls, reader.is_inside_call())
}

fn calls(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect()
}

#[test]
fn tagged_calls_follow_text_or_each_other() {
    let read = |text: &str| read(ToolDialect::Tagged, [text]);
    let one = ToolDialect::Tagged.write("f", r#"{"a": "}\"{", "b": [{}]}"#);
    let two = ToolDialect::Tagged.write("g-2", "{}");
    let (f, g) = (("f", r#"{"a": "}\"{", "b": [{}]}"#), ("g-2", "{}"));
    assert_eq!(read(&one), (String::new(), calls(&[f]), false));
    assert_eq!(read(&format!("Let me see. \n{one}\n{two}\n")), ("Let me see.".into(), calls(&[f, g]), false));
    assert_eq!(read("no call <tool_"), ("no call <tool_".into(), vec![], false));
    assert_eq!(read(" a \n"), (" a \n".into(), vec![], false));
    assert_eq!(read("x <tool_call> y"), ("x <tool_call> y".into(), vec![], false));
}

#[test]
fn a_cut_call_shows_what_there_is_of_it() {
    let whole = ToolDialect::Tagged.write("f", r#"{"a": 12}"#);
    let at = |length: usize| read(ToolDialect::Tagged, [&whole[..length]]);
    for dialect in DIALECTS {
        let whole = dialect.write("f", "{}");
        for length in 1..whole.find("{}").unwrap() {
            assert_eq!(read_demanded(dialect, ONE, [&whole[..length]]), (String::new(), vec![], false));
        }
    }
    let arguments = whole.find(r#"{"a""#).unwrap();
    assert_eq!(at(arguments - 1), (String::new(), vec![], false));
    assert_eq!(at(arguments + 7), (String::new(), calls(&[("f", r#"{"a": 1"#)]), true));
    assert_eq!(at(arguments + 9), (String::new(), calls(&[("f", r#"{"a": 12}"#)]), false));
}

#[test]
fn bare_calls_are_the_whole_answer() {
    for dialect in [ToolDialect::Bare, ToolDialect::Plain] {
        let read = |text: &str| read(dialect, [text]);
        assert_eq!(read(&dialect.write("f", r#"{"a": 1}"#)), (String::new(), calls(&[("f", r#"{"a": 1}"#)]), false));
        assert_eq!(read("{\"name\""), ("{\"name\"".into(), vec![], false));
        assert_eq!(read(r#"{"names": 1}"#), (r#"{"names": 1}"#.into(), vec![], false));
        let later = format!("So: {}", dialect.write("f", "{}"));
        assert_eq!(read(&later), (later.clone(), vec![], false));
    }
}

const DIALECTS: [ToolDialect; 3] = [ToolDialect::Tagged, ToolDialect::Bare, ToolDialect::Plain];

fn below(random: &mut u64, end: usize) -> usize {
    *random = mix(*random);
    (*random % end as u64) as usize
}

/// A piece of an answer, likely or not.
fn fragment(random: &mut u64) -> String {
    const ARGUMENTS: [&str; 3] = ["{}", r#"{"a": "}é\\"}"#, r#"{"b": [1, {"c": "\""}]}"#];
    const PARTS: [&str; 11] = [
        "\n",
        " ",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "{\"name\": \"",
        "é",
        "}",
        "\"",
        "\", \"arguments\": ",
        "f",
    ];
    match below(random, 2) {
        0 => DIALECTS[below(random, 3)].write(["f", "g-2"][below(random, 2)], ARGUMENTS[below(random, 3)]),
        _ => PARTS[below(random, PARTS.len())].to_owned(),
    }
}

#[test]
fn any_split_gives_the_same_calls() {
    let mut random = 7;
    let mut called = 0;
    for round in 0..2000 {
        let dialect = DIALECTS[round % 3];
        let text: String = (0..below(&mut random, 7)).map(|_| fragment(&mut random)).collect();
        let whole = read(dialect, [text.as_str()]);
        let mut places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for keep in [1, 3, 9] {
            let single = read(dialect, places.windows(2).map(|pair| &text[pair[0]..pair[1]]));
            assert_eq!(whole, single, "{dialect:?}, {text:?} cut at {places:?}");
            places.retain(|&at| at == 0 || at == text.len() || below(&mut random, keep + 1) == 0);
        }
        called += whole.1.len();
    }
    assert!(called > 500, "{called} calls");
}

fn callables() -> Vec<Callable> {
    let object = |json: Json| json.as_object().unwrap().clone();
    let number = json!({"type": "integer", "minimum": -9, "maximum": 99});
    let sum = json!({"type": "object", "properties": {"a": number, "b": number}, "required": ["a"]});
    let colour = json!({"properties": {"name": {"enum": ["red", "gre\"en"]}}, "required": ["name"]});
    let nothing = json!({"properties": {}});
    let named = [("add", sum), ("ad", colour), ("stop-it", nothing)];
    named.into_iter().map(|(name, schema)| Callable { name: name.to_owned(), schema: object(schema) }).collect()
}

/// Bytes of the text that a grammar takes, and whether the text may end there.
fn taken(grammars: &Grammars, grammar: &str, text: &str) -> (usize, bool) {
    let mut constraint = grammars.begin(&ConstraintSpec::Lark(grammar.to_owned()), &[ByteCodec::EOS]).unwrap();
    for (at, byte) in text.bytes().enumerate() {
        let token = TokenId::from(byte);
        let mask = constraint.allowed();
        if !mask.allows(token) {
            return (at, mask.allows(ByteCodec::EOS));
        }
        constraint.commit(token);
    }
    (text.len(), constraint.allowed().allows(ByteCodec::EOS))
}

/// Demands by name: left the choice, several calls, one call.
const FREE: Demand = Demand { must: false, many: true };
const MANY: Demand = Demand { must: true, many: true };
const ONE: Demand = Demand { must: true, many: false };

#[test]
fn grammars_take_calls_and_nothing_else_when_there_must_be_one() {
    let grammars = Grammars::new(&ByteCodec).unwrap();
    for dialect in DIALECTS {
        let write = |name: &str, arguments: &str| dialect.write(name, arguments);
        for demand in [MANY, ONE] {
            let grammar = grammar(dialect, &callables(), demand);
            let taken = |text: &str| taken(&grammars, &grammar, text);
            for (name, arguments) in [
                ("add", r#"{"a": 1}"#),
                ("add", r#"{"a": 99, "b": -9}"#),
                ("ad", r#"{"name": "gre\"en"}"#),
                ("stop-it", "{}"),
            ] {
                let text = write(name, arguments);
                assert_eq!(taken(&text), (text.len(), true), "{dialect:?}: {text}");
                assert!(!taken(&text[..text.len() - 1]).1, "{dialect:?}: {text} is not whole without its end");
            }
            for (name, arguments) in [
                ("take", "{}"),
                ("add", r#"{"a": 100}"#),
                ("add", "{}"),
                ("add", r#"{"a": 1, "c": 2}"#),
                ("stop-it", r#"{"a": 1}"#),
            ] {
                let text = write(name, arguments);
                assert!(taken(&text).0 < text.len(), "{dialect:?}: {text}");
            }
            assert_eq!(taken("So").0, 0, "{dialect:?}");
            let two = format!("{}\n{}", write("stop-it", "{}"), write("ad", r#"{"name": "red"}"#));
            let both = dialect.calls_many() && demand == MANY;
            assert_eq!(taken(&two), (if both { two.len() } else { write("stop-it", "{}").len() }, true), "{dialect:?}");
        }
    }
}

#[test]
fn grammars_take_any_text_where_the_model_chooses() {
    let grammars = Grammars::new(&ByteCodec).unwrap();
    for dialect in [ToolDialect::Tagged, ToolDialect::Bare] {
        let grammar = grammar(dialect, &callables(), FREE);
        let taken = |text: &str| taken(&grammars, &grammar, text);
        for text in ["", "So.\n\n", "<tool_ <tool_call", "{\"names\": 1} {}", "é{\"na", "\n{"] {
            assert_eq!(taken(text), (text.len(), true), "{dialect:?}: {text:?}");
        }
        let call = dialect.write("add", r#"{"a": 1}"#);
        assert_eq!(taken(&call), (call.len(), true), "{dialect:?}");
        let begun = &call[..call.find("add").unwrap()];
        assert_eq!(taken(begun), (begun.len(), false), "{dialect:?}: who begins a call makes it");
        assert_eq!(taken(&format!("{begun}zz")), (begun.len(), false), "{dialect:?}");
        let later = format!("So. {call}");
        assert_eq!(taken(&later), (later.len(), true), "{dialect:?}");
        let wrong = format!("So. {}", dialect.write("add", "{}"));
        assert_eq!(
            taken(&wrong).0 == wrong.len(),
            dialect == ToolDialect::Bare,
            "text that is no call may hold anything"
        );
        assert!(taken(&format!("{call} So")).0 < call.len() + 2, "{dialect:?}: nothing follows calls");
    }
}

#[test]
fn whatever_a_grammar_lets_through_is_read_as_calls_of_its_tools() {
    let grammars = Grammars::new(&ByteCodec).unwrap();
    let mut random = 3;
    for round in 0..60 {
        let (dialect, demand) = (DIALECTS[round % 3], [MANY, ONE][round / 3 % 2]);
        let spec = ConstraintSpec::Lark(grammar(dialect, &callables(), demand));
        let mut constraint = grammars.begin(&spec, &[ByteCodec::EOS]).unwrap();
        let mut bytes = Vec::new();
        loop {
            let mask = constraint.allowed();
            let may: Vec<TokenId> = (0..=ByteCodec::EOS).filter(|&id| mask.allows(id)).collect();
            let token = if mask.allows(ByteCodec::EOS) && below(&mut random, 2) == 0 {
                ByteCodec::EOS
            } else {
                may[below(&mut random, may.len())]
            };
            constraint.commit(token);
            match u8::try_from(token) {
                Ok(byte) => bytes.push(byte),
                Err(_) => break,
            }
        }
        let text = String::from_utf8(bytes).unwrap();
        let (rest, calls, inside) = read(dialect, [text.as_str()]);
        assert!(rest.is_empty() && !inside && !calls.is_empty(), "{dialect:?}: {text}");
        for (name, arguments) in calls {
            let value: Json = serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(callables().iter().any(|tool| tool.name == name) && value.is_object(), "{text}");
        }
    }
}
