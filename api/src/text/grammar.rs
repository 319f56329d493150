//! Answers in a form: JSON schemas and grammars over a vocabulary. Owner: the vocabulary, which compiles each form once and
//! keeps the latest; a request owns its way through it. Invariant: what is allowed leads to a complete answer, control
//! tokens never show in one, and a form cannot take more time or memory than its limits.

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value as Json, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use tokenrouter_core::constraint::{CONSTRAINT_BYTES_MAX, Constraint, ConstraintSpec, Mask};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::text::TextCodec;

/// Compiled forms that are kept for the next request with the same one.
const KEPT: usize = 32;
/// States of a form's lexer, 1 to 2 kB each.
const LEXER_STATES_MAX: usize = 50_000;
/// What marks a control token in the trie of a vocabulary; no text begins with it.
const CONTROL: u8 = 0xFF;
/// Characters of a complaint that are shown.
const COMPLAINT_CHARS: usize = 300;

/// Forms over one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    /// A token of no vocabulary: the end of an answer. Those that end it differ by model and request.
    end: TokenId,
    control: Arc<[TokenId]>,
    kept: Mutex<Vec<(ConstraintSpec, Matcher)>>,
}

impl Grammars {
    /// For a vocabulary; takes up to a second for a large one.
    ///
    /// # Errors
    /// What the grammar library says against the vocabulary.
    pub fn new(codec: &dyn TextCodec) -> Result<Self, String> {
        let end = codec.vocab_size();
        let word = |id: TokenId| {
            let bytes = codec.token_bytes(id).unwrap_or_default();
            match codec.is_special(id) {
                true => [&[CONTROL], bytes].concat(),
                false => bytes.to_vec(),
            }
        };
        let words: Vec<Vec<u8>> = (0..end).map(word).chain([[&[CONTROL], &b"<end>"[..]].concat()]).collect();
        let info = TokRxInfo::new(end + 1, end);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| complaint(&error))?;
        factory.quiet();
        let limits = factory.limits_mut();
        (limits.verbose_errors, limits.max_lexer_states) = (false, LEXER_STATES_MAX);
        let control = (0..end).filter(|&id| codec.is_special(id)).collect();
        Ok(Grammars { factory, end, control, kept: Mutex::default() })
    }

    /// An answer in this form, at its start; `eos` end it.
    ///
    /// # Errors
    /// What is wrong with the form.
    pub fn begin(&self, spec: &ConstraintSpec, eos: &[TokenId]) -> Result<Box<dyn Constraint>, String> {
        let bytes = spec.text().len();
        if bytes > CONSTRAINT_BYTES_MAX {
            return Err(format!("has {bytes} bytes; at most {CONSTRAINT_BYTES_MAX} are allowed"));
        }
        if eos.is_empty() {
            return Err("an answer in a form ends with end-of-text; leave ignore_eos out".to_owned());
        }
        let matcher = self.compiled(spec)?;
        Ok(Box::new(Formed { matcher, end: self.end, control: Arc::clone(&self.control), eos: eos.into() }))
    }

    fn compiled(&self, spec: &ConstraintSpec) -> Result<Matcher, String> {
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = kept.iter().position(|(other, _)| other == spec) {
                let latest = kept.remove(at);
                let matcher = latest.1.deep_clone();
                kept.push(latest);
                return Ok(matcher);
            }
        }
        let matcher = self.compile(spec)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push((spec.clone(), matcher.deep_clone()));
        Ok(matcher)
    }

    /// Compiles a form and looks at its first tokens: whatever is too large for the limits shows there.
    fn compile(&self, spec: &ConstraintSpec) -> Result<Matcher, String> {
        let grammar = match spec {
            ConstraintSpec::Json(text) => TopLevelGrammar::from_json_schema(spelled(text)?),
            ConstraintSpec::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        };
        let compiled = catch_unwind(AssertUnwindSafe(|| self.factory.create_parser(grammar)));
        let parser = compiled.map_err(|_| "the grammar library failed on it".to_owned())?;
        let mut matcher = Matcher::new(Ok(parser.map_err(|error| complaint(&error))?));
        let mask = matcher.compute_mask_or_eos().map_err(|error| complaint(&error))?;
        if mask.num_set() == 0 {
            return Err("no token of this vocabulary can begin it".to_owned());
        }
        Ok(matcher)
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars over {} tokens", self.end)
    }
}

/// The schema, with values spelled as Python's `json.dumps` does: white space only after `,` and `:`, so that an answer
/// cannot be white space without end.
fn spelled(text: &str) -> Result<Json, String> {
    let schema: Json = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut schema = match schema {
        Json::Object(schema) => schema,
        Json::Bool(true) => serde_json::Map::new(),
        other => return Err(format!("{other} is no schema of values; send an object")),
    };
    let spelling = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    schema.insert("x-guidance".to_owned(), spelling);
    Ok(schema.into())
}

/// The first line of what the library says.
fn complaint(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().next().unwrap_or_default().chars().take(COMPLAINT_CHARS).collect()
}

/// An answer within its form.
struct Formed {
    matcher: Matcher,
    end: TokenId,
    /// A form of anything but some words takes their marks for text.
    control: Arc<[TokenId]>,
    eos: Arc<[TokenId]>,
}

impl Formed {
    fn fail(&self, error: &anyhow::Error) {
        tracing::warn!(error = complaint(error), "an answer cannot be kept in its form");
    }
}

impl std::fmt::Debug for Formed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Formed(stopped: {})", self.matcher.is_stopped())
    }
}

impl Constraint for Formed {
    fn allowed(&mut self) -> Mask {
        let found = match self.matcher.compute_mask_or_eos() {
            Ok(found) => found,
            Err(error) => {
                self.fail(&error);
                return Mask::of(&[]);
            }
        };
        let mut words = found.as_slice().to_vec();
        let mut set = |id: TokenId, on: bool| {
            if let Some(word) = words.get_mut(id as usize / 32) {
                *word = *word & !(1 << (id % 32)) | u32::from(on) << (id % 32);
            }
        };
        let ends = found.is_allowed(self.end);
        set(self.end, false);
        self.control.iter().for_each(|&id| set(id, false));
        self.eos.iter().for_each(|&id| set(id, ends));
        Mask::new(words)
    }

    fn commit(&mut self, token: TokenId) {
        if self.eos.contains(&token) || self.matcher.is_error() {
            return;
        }
        if let Err(error) = self.matcher.consume_token(token) {
            self.fail(&error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::rng::{self, Stream};
    use tokenrouter_core::text::{SpecialTokens, TextError};

    /// A token per byte, some words, a control token and an end.
    struct Vocabulary(Vec<Vec<u8>>);

    const CONTROL_ID: TokenId = 262;
    const END: TokenId = 263;

    impl Vocabulary {
        fn new() -> Self {
            let words = ["\"a", "\": ", "{\"", "true", "}}", ", "].map(|word| word.as_bytes().to_vec());
            let named = ["<|x|>", "</s>"].map(|word| word.as_bytes().to_vec());
            Vocabulary((0..=255u8).map(|byte| vec![byte]).chain(words).chain(named).collect())
        }
    }

    impl TextCodec for Vocabulary {
        fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
            Ok(text.bytes().map(TokenId::from).collect())
        }

        fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
            self.0.get(id as usize).map(Vec::as_slice)
        }

        fn is_special(&self, id: TokenId) -> bool {
            id >= CONTROL_ID
        }

        fn vocab_size(&self) -> u32 {
            self.0.len() as u32
        }

        fn bos(&self) -> Option<TokenId> {
            None
        }

        fn strips_leading_space(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_form_of_anything_but_a_word_allows_no_control_token() {
        let grammars = Grammars::new(&Vocabulary::new()).expect("a good vocabulary");
        let spec = ConstraintSpec::Lark("start: ~/[a-z]{1,3}/".to_owned());
        let mut answer = grammars.begin(&spec, &[END]).expect("a good grammar");
        for token in [b'A', b'b', b' '] {
            let mask = answer.allowed();
            assert!(mask.allows(u32::from(token)) && !mask.allows(CONTROL_ID), "{mask:?}");
            answer.commit(u32::from(token));
        }
        assert!(answer.allowed().allows(END));
    }

    /// What comes out when tokens are drawn by chance from those that may come; closing ones are favoured, so that it ends.
    fn drawn(grammars: &Grammars, spec: &ConstraintSpec, seed: u64) -> String {
        let vocabulary = Vocabulary::new();
        let mut constraint = grammars.begin(spec, &[END]).unwrap();
        let mut bytes = Vec::new();
        for position in 0..4000 {
            let mask = constraint.allowed();
            assert!(!mask.allows(CONTROL_ID), "a control token is no text");
            let may: Vec<TokenId> = (0..=END).filter(|&id| mask.allows(id)).collect();
            assert!(!may.is_empty(), "stuck after {:?}", String::from_utf8_lossy(&bytes));
            let closing = may.iter().copied().find(|&id| id == END || matches!(id, 0x22 | 0x5D | 0x7D));
            let unit = rng::unit(seed, position, Stream::Token);
            let token = closing.filter(|_| unit < 0.4).unwrap_or(may[(unit * may.len() as f64) as usize]);
            constraint.commit(token);
            if token == END {
                return String::from_utf8(bytes).unwrap();
            }
            bytes.extend(vocabulary.token_bytes(token).unwrap());
        }
        panic!("no end: {:?}", String::from_utf8_lossy(&bytes));
    }

    fn schema(json: Json) -> ConstraintSpec {
        ConstraintSpec::Json(json.to_string())
    }

    #[test]
    fn whatever_is_drawn_follows_the_schema() {
        let grammars = Grammars::new(&Vocabulary::new()).unwrap();
        let kinds = json!({"type": "object", "additionalProperties": false, "required": ["a", "n", "k", "list"],
            "properties": {"a": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 120},
                "k": {"enum": ["red", "blue"]}, "list": {"type": "array", "items": {"type": "null"}, "maxItems": 3}}});
        let spec = schema(kinds);
        for seed in 0..60 {
            let text = drawn(&grammars, &spec, seed);
            let value: Json = serde_json::from_str(&text).unwrap();
            assert!(value["a"].is_boolean() && value["n"].as_u64().is_some_and(|n| n <= 120), "{text}");
            assert!(["red", "blue"].contains(&value["k"].as_str().unwrap()), "{text}");
            assert!(value["list"].as_array().unwrap().iter().all(Json::is_null), "{text}");
            assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
        }
        for seed in 0..20 {
            let text = drawn(&grammars, &schema(json!({"type": "object"})), seed);
            assert!(serde_json::from_str::<Json>(&text).unwrap().is_object(), "{text}");
        }
    }

    #[test]
    fn an_answer_ends_when_it_is_complete_and_not_before() {
        let grammars = Grammars::new(&Vocabulary::new()).unwrap();
        let spec = ConstraintSpec::Lark("start: \"ab\" \"c\"?".to_owned());
        let mut constraint = grammars.begin(&spec, &[END, 7]).unwrap();
        let allowed = |constraint: &mut Box<dyn Constraint>| {
            let mask = constraint.allowed();
            (0..=END).filter(|&id| mask.allows(id)).collect::<Vec<_>>()
        };
        assert_eq!(allowed(&mut constraint), [0x61]);
        constraint.commit(0x61);
        assert_eq!(allowed(&mut constraint), [0x62]);
        constraint.commit(0x62);
        assert_eq!(allowed(&mut constraint), [7, 0x63, END], "both ends, or more");
        constraint.commit(0x63);
        assert_eq!(allowed(&mut constraint), [7, END]);
        constraint.commit(END);
        let mut broken = grammars.begin(&spec, &[END]).unwrap();
        broken.commit(0x7A);
        assert!(allowed(&mut broken).is_empty(), "nothing leads on from what is not allowed");
    }

    #[test]
    fn forms_that_cannot_be_are_refused_with_their_reason() {
        let grammars = Grammars::new(&Vocabulary::new()).unwrap();
        let fault = |spec: ConstraintSpec| grammars.begin(&spec, &[END]).map(drop).unwrap_err();
        assert!(fault(ConstraintSpec::Json("{".to_owned())).contains("EOF"));
        assert!(fault(schema(json!([1]))).contains("is no schema"));
        assert!(
            fault(schema(json!({"type": "thing"}))).contains("thing"),
            "{}",
            fault(schema(json!({"type": "thing"})))
        );
        assert!(fault(schema(json!({"$ref": "https://x.y/z"}))).len() > 5);
        assert!(fault(schema(json!({"type": "integer", "minimum": 3, "maximum": 2}))).len() > 5);
        assert!(fault(ConstraintSpec::Lark("start: x".to_owned())).contains('x'));
        assert!(fault(ConstraintSpec::Json(" ".repeat(CONSTRAINT_BYTES_MAX + 1))).contains("bytes"));
        let eager = grammars.begin(&schema(json!({})), &[]).map(drop).unwrap_err();
        assert!(eager.contains("ignore_eos"), "{eager}");
    }

    #[test]
    fn forms_are_compiled_once_and_the_latest_are_kept() {
        let grammars = Grammars::new(&Vocabulary::new()).unwrap();
        for n in 0..KEPT + 5 {
            let spec = schema(json!({"const": n}));
            drawn(&grammars, &spec, 1);
            assert_eq!(drawn(&grammars, &spec, 2), n.to_string());
        }
        let kept = grammars.kept.lock().unwrap();
        assert_eq!(kept.len(), KEPT);
        assert_eq!(kept[0].0, schema(json!({"const": 5})));
    }
}
