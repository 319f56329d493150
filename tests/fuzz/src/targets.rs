//! The targets: each takes bytes and must end without a panic, in bounded time and memory; what is accepted must hold
//! together. Owner: the fuzz program. Invariant: an input of several parts has NUL bytes between them, so that texts stay
//! readable and tensor data, which no reader looks at, need not be mutated.

use serde_json::{Map, Value};
use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenrouter::http::types::chat::ChatRequest;
use tokenrouter::http::types::completions::CompletionRequest;
use tokenrouter::http::types::tokens::{DetokenizeRequest, TokenizeRequest};
use tokenrouter::text::{ChatInput, ChatTemplate, ControlGuard, ModelText, NamedTokens, Tokenizer};
use tokenrouter_actors::link::check::Bounds;
use tokenrouter_actors::link::wire::{self, Answer, Parcel};
use tokenrouter_config::LaunchFile;
use tokenrouter_core::constraint::ConstraintSpec;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::text::{SpecialTokens, TextCodec};
use tokenrouter_gpu::heads;
use tokenrouter_gpu::weights::{self, Gguf, ModelFiles, TextSource};

/// What a target does with an input.
pub type Target = fn(&[u8]);

/// All targets by name.
pub const ALL: [(&str, Target); 9] = [
    ("gguf", gguf),
    ("safetensors", safetensors),
    ("tokenizer", tokenizer),
    ("config", config),
    ("wire", link_frames),
    ("body", body),
    ("template", template),
    ("heads", head_files),
    ("grammar", grammar),
];

/// Zeros behind the head of a model file, in place of its tensors.
const TENSOR_BYTES: u64 = 1 << 20;
/// Tokens of the vocabulary that requests are read for.
const VOCAB: u32 = 1000;

fn scratch() -> PathBuf {
    PathBuf::from(std::env::var_os("FUZZ_SCRATCH").expect("FUZZ_SCRATCH names a folder"))
}

/// Writes a file of the scratch folder: `content`, then `zeros` that take no room.
fn write(name: &str, content: &[u8], zeros: u64) -> PathBuf {
    let path = scratch().join(name);
    let mut file = File::create(&path).expect("the scratch folder can be written");
    file.write_all(content).expect("it can be written");
    file.set_len(content.len() as u64 + zeros).expect("it can be made longer");
    path
}

/// The parts of an input; the last one takes the rest.
fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut rest = data.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| rest.next().unwrap_or_default())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A model file; the last byte says whether tensors follow. What names a vocabulary is read as one even where the tensors
/// are wrong.
fn gguf(data: &[u8]) {
    let zeros = if data.last().is_some_and(|last| last % 2 == 0) { TENSOR_BYTES } else { 0 };
    let path = write("model.gguf", data, zeros);
    if let Ok(files) = weights::open(&path) {
        files.inspect().ok();
        speak(&files);
    } else if let Ok(gguf) = Gguf::open(&path) {
        FILES.with_borrow_mut(|files| {
            files.text = TextSource::Gguf(Arc::new(gguf));
            speak(files);
        });
    }
}

thread_local! {
    /// A good model, to lend its weights to a vocabulary.
    static FILES: RefCell<ModelFiles> = RefCell::new(weights::open(&scratch().join("good.gguf")).expect("a model"));
}

fn speak(files: &ModelFiles) {
    if let Ok(model) = ModelText::load(files) {
        encode(&model.tokenizer, "A text, <s> of \u{1f600} some 12345 words.");
    }
}

/// Whatever the vocabulary is, its encodings consist of its tokens.
fn encode(tokenizer: &Tokenizer, text: &str) {
    for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
        for id in tokenizer.encode(text, special).unwrap_or_default() {
            assert!(tokenizer.token_bytes(id).is_some(), "token {id} of {text:?} is none of the vocabulary");
        }
    }
    for id in (0..VOCAB).chain([u32::MAX]) {
        tokenizer.token_bytes(id);
        tokenizer.is_special(id);
    }
}

/// `config.json`, NUL, the head of the tensors as JSON (the tensors are zeros) or a whole file.
fn safetensors(data: &[u8]) {
    let [config, head] = parts::<2>(data);
    write("hf/config.json", config, 0);
    let file = match head.first() {
        Some(b'{') => {
            write("hf/model.safetensors", &[&(head.len() as u64).to_le_bytes(), head].concat(), tensor_bytes(head))
        }
        _ => write("hf/model.safetensors", head, 0),
    };
    if let Ok(weights) = weights::open_safetensors(&file) {
        assert!(weights.total_bytes() <= TENSOR_BYTES, "more bytes than the file has");
    }
    if let Ok(files) = weights::open(file.parent().unwrap_or(Path::new("."))) {
        files.inspect().ok();
    }
}

/// Where the last tensor ends, by a head of safetensors.
fn tensor_bytes(head: &[u8]) -> u64 {
    let head: Map<String, Value> = serde_json::from_slice(head).unwrap_or_default();
    let ends = head.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    ends.max().unwrap_or(0).min(TENSOR_BYTES)
}

/// `tokenizer.json`, NUL, a text.
fn tokenizer(data: &[u8]) {
    let [description, words] = parts::<2>(data);
    let Ok(description) = serde_json::from_slice(description) else { return };
    if let Ok(tokenizer) = Tokenizer::from_description(description, Some(1)) {
        encode(&tokenizer, &text(words));
    }
}

/// A launch file; what is printed of a good one is a good one.
fn config(data: &[u8]) {
    let path = Path::new("launch.toml");
    if let Ok(file) = LaunchFile::parse(&text(data), path) {
        let printed = file.to_toml();
        let again = LaunchFile::parse(&printed, path).unwrap_or_else(|error| panic!("{error} in:\n{printed}"));
        assert_eq!(again.to_toml(), printed);
    }
}

/// The content of a frame between two processes; what can be read can be written and read again.
fn link_frames(data: &[u8]) {
    wire::decode_hello(data).ok();
    wire::decode::<Answer>(data).ok();
    let Ok(parcel) = wire::decode::<Parcel>(data) else { return };
    let (from, to) = (parcel.envelope.from, parcel.to);
    Bounds { from, to, models: 2, vocab_size: VOCAB, context_len: 512 }.fault(&parcel);
    Bounds { from: ModelIdx(0), to: ModelIdx(1), models: 9, vocab_size: u32::MAX, context_len: u32::MAX }
        .fault(&parcel);
    let frame = wire::encode(&parcel).expect("what was read can be written");
    wire::decode::<Parcel>(&frame[wire::LENGTH_BYTES..]).expect("what was written can be read");
}

/// A request body; the first byte says to which route.
fn body(data: &[u8]) {
    let Some((route, body)) = data.split_first() else { return };
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return };
    match route % 4 {
        0 => {
            if let Ok(request) = ChatRequest::read(body, VOCAB) {
                request.conversation.bytes();
                request.conversation.messages.iter().for_each(|message| drop(message.for_template()));
            }
        }
        1 => drop(CompletionRequest::read(body, VOCAB)),
        2 => drop(TokenizeRequest::read(body)),
        _ => drop(DetokenizeRequest::read(body, VOCAB)),
    }
}

/// A chat template, NUL, a list of messages, NUL, a list of tools.
fn template(data: &[u8]) {
    let [source, messages, tools] = parts::<3>(data);
    let name = |token: &str| Some(token.to_owned());
    let tokens = NamedTokens { bos: name("<s>"), eos: name("<|im_end|>") };
    let Ok(template) = ChatTemplate::new(&text(source), tokens) else { return };
    let Ok(messages) = serde_json::from_slice::<Vec<Value>>(messages) else { return };
    let tools = serde_json::from_slice::<Vec<Value>>(tools).ok();
    let control = ["<s>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
    let guard = ControlGuard::new(control).expect("control tokens of several characters");
    let input = ChatInput { tools: tools.as_deref(), ..ChatInput::of(&messages, 1_700_000_000) };
    template.render(&input, &guard).ok();
}

/// A checkpoint of torch, or `head.json`, NUL and the head of its tensors.
fn head_files(data: &[u8]) {
    if data.first() == Some(&b'{') {
        let [config, head] = parts::<2>(data);
        write("head/head.json", config, 0);
        let file = [&(head.len() as u64).to_le_bytes(), head].concat();
        write("head/head.safetensors", &file, tensor_bytes(head));
        heads::open(&scratch().join("head")).ok();
    } else {
        let path = write("head.pt", data, 0);
        heads::convert(&path, &scratch().join("converted"), None).ok();
    }
}

/// Tokens of an answer that is looked at.
const ANSWER_TOKENS: usize = 24;

thread_local! {
    /// A vocabulary for answers in a form.
    static WORDS: Tokenizer = {
        let path = scratch().join("tokenizer.json");
        let description = serde_json::from_slice(&std::fs::read(path).expect("a tokenizer")).expect("JSON");
        Tokenizer::from_description(description, None).expect("a good tokenizer")
    };
}

/// A JSON schema (or a grammar, after a first byte L), NUL, bytes that choose among the tokens it allows. An answer can
/// always go on or end.
fn grammar(data: &[u8]) {
    let [form, choices] = parts::<2>(data);
    let spec = match form.split_first() {
        Some((b'L', lark)) => ConstraintSpec::Lark(text(lark)),
        _ => ConstraintSpec::Json(text(form)),
    };
    WORDS.with(|words| {
        let end = 2;
        let Ok(mut answer) = words.constraint(&spec, &[end]) else { return };
        for &choice in choices.iter().take(ANSWER_TOKENS) {
            let mask = answer.allowed();
            let allowed: Vec<u32> = (0..words.vocab_size()).filter(|&id| mask.allows(id)).collect();
            let Some(&token) = allowed.get(usize::from(choice) % allowed.len().max(1)) else { return };
            if token == end {
                return;
            }
            assert!(!words.is_special(token), "control token {token} in an answer");
            answer.commit(token);
        }
    });
}
