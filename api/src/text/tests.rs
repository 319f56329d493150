//! Tokenizers built from tiny vocabularies against slow references, and the promises about control tokens.

use super::bytes::tests::char_of;
use super::pre_tokenizers::PreTokenizer;
use super::*;
use serde_json::json;
use std::collections::HashMap;
use tokenrouter_core::text::SpecialTokens::{AsText, Parse};
use tokenrouter_gpu::weights::Metadata;

/// A sequence of pseudo-random numbers (splitmix64).
struct Noise(u64);

impl Noise {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn text(&mut self, alphabet: &[&str], max_parts: usize) -> String {
        let parts = self.below(max_parts + 1);
        (0..parts).map(|_| alphabet[self.below(alphabet.len())]).collect()
    }
}

fn fresh() -> (u64, Noise) {
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    (seed, Noise(seed))
}

fn texts(list: &[String]) -> Value {
    Value::Array(list.iter().map(|text| Value::Text(text.clone())).collect())
}

fn numbers(list: impl IntoIterator<Item = i64>) -> Value {
    Value::Array(list.into_iter().map(Value::Signed).collect())
}

use tokenrouter_gpu::weights::Value;

const CONTROL_TOKENS: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<s>"];
const ALPHABET: [&str; 26] = [
    "a",
    "b",
    "ab",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "1",
    "234",
    "é",
    "e\u{301}",
    "你",
    "👋🏽",
    "'s",
    "'LL",
    ".",
    "?!",
    "<",
    "|>",
    "<|im_end|>",
    "<|im_start|>",
    "<s>",
    "<tool>",
    "\u{FFFD}",
    "\u{1}",
];

/// All 256 bytes, a few merges, `<tool>` as an added token, the control tokens, and two ids of padding.
fn byte_level_metadata(pre: &str) -> Metadata {
    let merges = ["a b", "Ġ a", "Ġa b", "Ã ©", "l l", "' s", "1 2", "Ċ Ċ", "ä ½", "ä½ ł"];
    let mut tokens: Vec<String> = (0..=255).map(|byte| char_of(byte).to_string()).collect();
    tokens.extend(merges.map(|merge| merge.replace(' ', "")));
    let ordinary = tokens.len();
    tokens.push("<tool>".into());
    tokens.extend(CONTROL_TOKENS.map(str::to_owned));
    let real = tokens.len();
    tokens.extend(["[PAD0]".to_owned(), "[PAD1]".to_owned()]);
    let kind = |id: usize| {
        if id < ordinary {
            1
        } else if id == ordinary {
            4
        } else if id < real {
            3
        } else {
            5
        }
    };
    let bos = Value::Unsigned(real as u64 - 1);
    Metadata::from_iter([
        ("tokenizer.ggml.model", Value::Text("gpt2".into())),
        ("tokenizer.ggml.pre", Value::Text(pre.into())),
        ("tokenizer.ggml.token_type", numbers((0..tokens.len()).map(kind))),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.merges", texts(&merges.map(str::to_owned))),
        ("tokenizer.ggml.bos_token_id", bos),
    ])
}

fn from_metadata(metadata: &Metadata) -> Result<Tokenizer, String> {
    let vocab = gguf_vocab::read(metadata)?;
    Tokenizer::from_description(vocab.tokenizer, vocab.prompt_start)
}

fn byte_level(pre: &str) -> Tokenizer {
    from_metadata(&byte_level_metadata(pre)).unwrap()
}

fn decode(tokenizer: &Tokenizer, ids: &[TokenId]) -> String {
    let bytes = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap().iter().copied()).collect();
    String::from_utf8(bytes).unwrap()
}

fn has_control(tokenizer: &Tokenizer, ids: &[TokenId]) -> bool {
    ids.iter().any(|&id| tokenizer.is_special(id))
}

#[test]
fn byte_level_text_survives_and_holds_no_control_token() {
    let (seed, mut noise) = fresh();
    for pre in PreTokenizer::names().split(", ") {
        let tokenizer = byte_level(pre);
        let composes = PreTokenizer::named(pre).unwrap().nfc;
        for _ in 0..100 {
            let text = noise.text(&ALPHABET, 12);
            let ids = tokenizer.encode(&text, AsText).unwrap();
            assert!(!has_control(&tokenizer, &ids), "{pre}, seed {seed}: {text:?}");
            let expected = if composes { text.replace("e\u{301}", "é") } else { text.clone() };
            assert_eq!(decode(&tokenizer, &ids), expected, "{pre}, seed {seed}");
            let parsed = tokenizer.encode(&text, Parse).unwrap();
            assert_eq!(decode(&tokenizer, &parsed), expected, "{pre}, seed {seed}");
            let expected = CONTROL_TOKENS.iter().any(|token| text.contains(token));
            assert_eq!(has_control(&tokenizer, &parsed), expected, "{pre}, seed {seed}: {text:?}");
        }
    }
}

/// Byte-pair encoding as it is defined: while any pair of neighbours has a merge, apply the one of lowest rank, leftmost first.
fn slow_bpe(word: &[u8], ranks: &HashMap<(String, String), usize>) -> Vec<String> {
    let mut parts: Vec<String> = word.iter().map(|&byte| char_of(byte).to_string()).collect();
    loop {
        let rank = |at: &usize| ranks.get(&(parts[*at].clone(), parts[*at + 1].clone())).copied();
        let best = (0..parts.len().saturating_sub(1)).filter(|at| rank(at).is_some()).min_by_key(rank);
        let Some(at) = best else {
            return parts;
        };
        let right = parts.remove(at + 1);
        parts[at].push_str(&right);
    }
}

#[test]
fn byte_level_merges_equal_the_definition() {
    let (seed, mut noise) = fresh();
    let (tokenizer, metadata) = (byte_level("gpt-2"), byte_level_metadata("gpt-2"));
    let merges = metadata.get("tokenizer.ggml.merges").unwrap().as_array().unwrap();
    let ranks = merges.iter().enumerate().map(|(rank, merge)| {
        let (left, right) = merge.as_str().unwrap().split_once(' ').unwrap();
        ((left.to_owned(), right.to_owned()), rank)
    });
    let ranks: HashMap<(String, String), usize> = ranks.collect();
    for _ in 0..300 {
        // A word that the split leaves whole: one space, then letters.
        let word = format!(" {}", noise.text(&["a", "b", "l", "é", "你"], 9));
        let expected: Vec<TokenId> =
            slow_bpe(word.as_bytes(), &ranks).iter().map(|part| tokenizer.token_id(part).unwrap()).collect();
        assert_eq!(tokenizer.encode(&word, AsText).unwrap(), expected, "seed {seed}: {word:?}");
    }
}

/// Pieces and scores of a SentencePiece vocabulary with byte tokens, random scores and a space prefix.
fn pieces(noise: &mut Noise) -> Vec<(String, i64, f64)> {
    let mut rows = vec![("<unk>".to_owned(), 2, 0.0), ("<s>".to_owned(), 3, 0.0), ("<|im_end|>".to_owned(), 3, 0.0)];
    rows.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 6, 0.0)));
    let words =
        ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "cab", "▁▁", "aa", "bb", "abab", "<", "s", ">"];
    let mut scores: Vec<usize> = (0..words.len()).collect();
    for at in (1..scores.len()).rev() {
        scores.swap(at, noise.below(at + 1));
    }
    rows.extend(words.iter().zip(scores).map(|(word, score)| ((*word).to_owned(), 1, -(score as f64))));
    rows
}

fn piece_metadata(rows: &[(String, i64, f64)], space_prefix: bool) -> Metadata {
    let words: Vec<String> = rows.iter().map(|row| row.0.clone()).collect();
    Metadata::from_iter([
        ("tokenizer.ggml.model", Value::Text("llama".into())),
        ("tokenizer.ggml.tokens", texts(&words)),
        ("tokenizer.ggml.token_type", numbers(rows.iter().map(|row| row.1))),
        ("tokenizer.ggml.scores", Value::Array(rows.iter().map(|row| Value::Float(row.2)).collect())),
        ("tokenizer.ggml.add_space_prefix", Value::Bool(space_prefix)),
        ("tokenizer.ggml.bos_token_id", Value::Unsigned(1)),
    ])
}

/// SentencePiece's BPE as it is defined: while the union of any two neighbours is a piece, merge the best scoring union,
/// leftmost first; characters without a piece become their bytes.
fn slow_pieces(text: &str, rows: &[(String, i64, f64)]) -> Vec<TokenId> {
    let find = |piece: &str| rows.iter().position(|row| row.0 == piece && row.1 == 1);
    let mut parts: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
    loop {
        let score = |at: &usize| find(&format!("{}{}", parts[*at], parts[*at + 1])).map(|id| rows[id].2);
        let best = (0..parts.len().saturating_sub(1))
            .filter_map(|at| score(&at).map(|score| (at, score)))
            .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
        let Some((at, _)) = best else { break };
        let right = parts.remove(at + 1);
        parts[at].push_str(&right);
    }
    let bytes = |part: &str| part.bytes().map(|byte| 3 + u32::from(byte)).collect();
    parts.iter().flat_map(|part| find(part).map_or_else(|| bytes(part), |id| vec![id as TokenId])).collect()
}

#[test]
fn pieces_merge_as_sentence_piece_defines() {
    let (seed, mut noise) = fresh();
    for round in 0..20 {
        let (rows, prefix) = (pieces(&mut noise), round % 2 == 0);
        let tokenizer = from_metadata(&piece_metadata(&rows, prefix)).unwrap();
        assert_eq!(tokenizer.strips_leading_space(), prefix);
        for _ in 0..50 {
            let text = noise.text(&["a", "b", "c", " ", "é", "<", "s", ">", "<s>", "<|im_end|>"], 14);
            let ids = tokenizer.encode(&text, AsText).unwrap();
            let spaced = if prefix && !text.is_empty() { format!(" {text}") } else { text.clone() };
            assert_eq!(ids, slow_pieces(&spaced, &rows), "seed {seed}, round {round}: {text:?}");
            assert_eq!(decode(&tokenizer, &ids), spaced, "seed {seed}, round {round}");
        }
    }
}

#[test]
fn tokens_one_by_one_are_the_text() {
    let rows = pieces(&mut Noise(1));
    let tokenizer = from_metadata(&piece_metadata(&rows, true)).unwrap();
    let ids = tokenizer.encode("a 你b", AsText).unwrap();
    let bytes: Vec<&[u8]> = ids.iter().map(|&id| tokenizer.token_bytes(id).unwrap()).collect();
    assert_eq!(bytes.concat(), " a 你b".as_bytes());
    assert!(bytes.contains(&&[0xe4][..]));
}

#[test]
fn padding_is_no_token_and_changes_no_digest() {
    let metadata = byte_level_metadata("qwen2");
    let tokenizer = byte_level("qwen2");
    let rows = metadata.get("tokenizer.ggml.tokens").unwrap().as_array().unwrap().len() as u32;
    assert_eq!(tokenizer.vocab_size(), rows - 2);
    assert!(tokenizer.token_bytes(rows - 3).is_some());
    assert!(tokenizer.token_bytes(rows - 2).is_none() && tokenizer.token_bytes(u32::MAX).is_none());
    assert!(!tokenizer.is_special(rows - 2));

    let fewer = from_metadata(&without_padding(metadata)).unwrap();
    assert_eq!(fewer.digest(), tokenizer.digest());
    assert_ne!(from_metadata(&piece_metadata(&pieces(&mut Noise(1)), true)).unwrap().digest(), tokenizer.digest());
}

fn without_padding(metadata: Metadata) -> Metadata {
    let shorter = |key: &str, value: &Value| match value {
        Value::Array(values) if key != "tokenizer.ggml.merges" => Value::Array(values[..values.len() - 2].to_vec()),
        other => other.clone(),
    };
    metadata.iter().map(|(key, value)| (key, shorter(key, value))).collect()
}

#[test]
fn vocabularies_that_cannot_be_used_are_refused_by_key() {
    let cases: [(&str, Value, &[&str]); 7] = [
        ("tokenizer.ggml.pre", Value::Text("frob".into()), &["tokenizer.ggml.pre", "frob", "qwen2"]),
        ("tokenizer.ggml.pre", Value::Bool(true), &["tokenizer.ggml.pre"]),
        ("tokenizer.ggml.model", Value::Text("rwkv".into()), &["tokenizer.ggml.model", "rwkv"]),
        ("tokenizer.ggml.merges", texts(&["ab".to_owned()]), &["tokenizer.ggml.merges", "ab"]),
        ("tokenizer.ggml.merges", texts(&["x yz".to_owned()]), &["yz"]),
        ("tokenizer.ggml.token_type", numbers([1]), &["tokenizer.ggml.token_type"]),
        ("tokenizer.ggml.add_bos_token", Value::Unsigned(1), &["tokenizer.ggml.add_bos_token"]),
    ];
    for (key, value, words) in cases {
        let mut metadata = byte_level_metadata("gpt-2");
        metadata.insert(key.into(), value);
        let error = from_metadata(&metadata).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{key}: {error}");
    }
}

#[test]
fn a_start_token_stands_once_and_only_where_wanted() {
    let start = |metadata: &Metadata| from_metadata(metadata).unwrap().bos();
    let mut metadata = byte_level_metadata("gpt-2");
    assert_eq!(start(&metadata), None);
    metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(true));
    let tokenizer = from_metadata(&metadata).unwrap();
    let bos = tokenizer.bos().unwrap();
    assert_eq!(tokenizer.token_bytes(bos), Some(&b"<s>"[..]));
    assert_eq!(tokenizer.encode_prompt("a", AsText).unwrap()[0], bos);
    let twice = tokenizer.encode_prompt("<s>a", Parse).unwrap();
    assert_eq!(twice.iter().filter(|&&id| id == bos).count(), 1);
    assert_eq!(tokenizer.encode_prompt("", Parse).unwrap(), [bos]);
    assert!(start(&byte_level_metadata("llama-bpe")).is_some());
    metadata.insert("tokenizer.ggml.bos_token_id".into(), Value::Unsigned(99_999));
    assert_eq!(start(&metadata), None);
}

#[test]
fn no_merge_and_no_whole_word_makes_a_control_token() {
    let mut metadata = byte_level_metadata("llama-bpe");
    let mut tokens = metadata.get("tokenizer.ggml.tokens").unwrap().as_array().unwrap().to_vec();
    let mut kinds = metadata.get("tokenizer.ggml.token_type").unwrap().as_array().unwrap().to_vec();
    let ll = tokens.iter().position(|token| token.as_str() == Some("ll")).unwrap();
    kinds[ll] = Value::Signed(3);
    tokens.push(Value::Text("baa".into()));
    kinds.push(Value::Signed(3));
    metadata.insert("tokenizer.ggml.tokens".into(), Value::Array(tokens));
    metadata.insert("tokenizer.ggml.token_type".into(), Value::Array(kinds));
    let tokenizer = from_metadata(&metadata).unwrap();
    for text in ["ll", "baa", "all baa ll", "lll"] {
        let ids = tokenizer.encode(text, AsText).unwrap();
        assert!(!has_control(&tokenizer, &ids), "{text:?}: {ids:?}");
        assert_eq!(decode(&tokenizer, &ids), text);
        assert!(has_control(&tokenizer, &tokenizer.encode(text, Parse).unwrap()));
    }
}

#[test]
fn a_text_with_two_ids_is_refused() {
    let mut metadata = byte_level_metadata("gpt-2");
    let mut tokens = metadata.get("tokenizer.ggml.tokens").unwrap().as_array().unwrap().to_vec();
    tokens[1] = tokens[0].clone();
    metadata.insert("tokenizer.ggml.tokens".into(), Value::Array(tokens));
    assert!(from_metadata(&metadata).unwrap_err().contains("0 and 1"));
}

/// A `tokenizer.json` with everything that must not take effect: truncation, padding, added tokens.
fn hf_description() -> Json {
    let mut vocab: serde_json::Map<String, Json> =
        (0..=255).map(|byte: u8| (char_of(byte).to_string(), u32::from(byte).into())).collect();
    vocab.insert("ab".into(), 256.into());
    json!({
        "version": "1.0",
        "truncation": { "max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right" },
        "padding": null,
        "added_tokens": [
            { "id": 305, "content": "<late>", "special": true, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false },
            { "id": 300, "content": "<s>", "special": true, "normalized": true, "single_word": false, "lstrip": false, "rstrip": false },
            { "id": 301, "content": "<think>", "special": false, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false },
        ],
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [300], "tokens": ["<s>"] } },
        },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": ["a b"] },
    })
}

#[test]
fn a_tokenizer_json_is_used_without_its_extras() {
    let description = hf_description();
    let start = description::prompt_start(&description);
    assert_eq!(start, Some(300));
    let tokenizer = Tokenizer::from_description(description, start).unwrap();
    assert_eq!(tokenizer.encode("abab<s>", AsText).unwrap(), [256, 256, 60, 115, 62]);
    assert_eq!(tokenizer.encode("abab<s>", Parse).unwrap(), [256, 256, 300]);
    assert_eq!(tokenizer.encode("<think>", AsText).unwrap(), [301]);
    assert_eq!(tokenizer.encode("<late>", Parse).unwrap(), [305]);
    assert_eq!((tokenizer.token_id("<late>"), tokenizer.token_id("ab")), (Some(305), Some(256)));
    assert_eq!((tokenizer.vocab_size(), tokenizer.strips_leading_space()), (306, false));
    assert!(tokenizer.token_bytes(299).is_none(), "an id between real ones stands for nothing");
    assert!(tokenizer.is_special(300) && !tokenizer.is_special(301) && !tokenizer.is_special(299));
}

#[test]
fn a_character_without_tokens_is_an_error_and_not_dropped() {
    let mut description = hf_description();
    description["model"]["vocab"].as_object_mut().unwrap().remove(&char_of(0xf0).to_string());
    let tokenizer = Tokenizer::from_description(description, None).unwrap();
    let error = tokenizer.encode("ok 👋", AsText).unwrap_err().to_string();
    assert!(error.contains('👋'), "{error}");
    assert_eq!(decode(&tokenizer, &tokenizer.encode("ok é <s>", AsText).unwrap()), "ok é <s>");
}

#[test]
fn descriptions_that_cannot_be_used_are_refused() {
    let refuse = |change: &dyn Fn(&mut Json)| {
        let mut description = hf_description();
        change(&mut description);
        Tokenizer::from_description(description, None).unwrap_err()
    };
    assert!(refuse(&|d| d["model"]["type"] = "Unigram".into()).contains("Unigram"));
    assert!(refuse(&|d| d["model"]["vocab"] = Json::Null).contains("model.vocab"));
    assert!(refuse(&|d| d["added_tokens"][1]["id"] = (-1).into()).contains("<s>"));
    assert!(refuse(&|d| d["added_tokens"][1]["id"] = 4_000_000_000u64.into()).contains("<s>"));
    assert!(refuse(&|d| d["added_tokens"][1]["content"] = "§".into()).contains('§'));
    assert!(refuse(&|d| d["model"]["merges"] = json!(["a c"])).contains("ac"));
    let plain = refuse(&|d| {
        d["decoder"] = Json::Null;
        d["pre_tokenizer"] = Json::Null;
    });
    assert!(plain.contains("byte-level"), "{plain}");
}

const CHATML: &str = "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

#[test]
fn a_users_control_tokens_are_text_in_a_chat() {
    let mut metadata = byte_level_metadata("qwen2");
    metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(true));
    let tokenizer = Arc::new(from_metadata(&metadata).unwrap());
    let bos = tokenizer.bos();
    let tokens = NamedTokens { bos: token_text(&tokenizer, bos), eos: None };
    let template = Some(Arc::new(ChatTemplate::new(CHATML, tokens).unwrap()));
    let text = ModelText { tokenizer: tokenizer.clone(), template };
    let chat = |content: &str| {
        let messages = [json!({ "role": "user", "content": content })];
        let input = ChatInput::of(&messages, 0);
        text.chat(&input).unwrap()
    };
    let id = |token: &str| tokenizer.token_id(token).unwrap();
    let (start, end) = (id("<|im_start|>"), id("<|im_end|>"));
    let plain = |text: &str| tokenizer.encode(text, AsText).unwrap();
    let (seed, mut noise) = fresh();
    for round in 0..200 {
        let content = if round == 0 { "<|im_end|>".to_owned() } else { noise.text(&ALPHABET, 10) };
        let head = vec![bos.unwrap(), start];
        let user = plain(&format!("user\n{content}"));
        let tail = [vec![end], plain("\n"), vec![start], plain("assistant\n")].concat();
        assert_eq!(chat(&content), [head, user, tail].concat(), "seed {seed}, round {round}: {content:?}");
    }
    let none = ModelText { tokenizer, template: None };
    let input = ChatInput::of(&[], 0);
    assert_eq!(none.chat(&input), Err(ChatError::NoTemplate));
}
