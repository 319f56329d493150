//! Builds the fuzz targets of `tests/fuzz` and runs each for a few seconds (FUZZ_SECONDS for longer), from seeds made of
//! fixtures and from every input that once was a finding. Owner: tests/fuzz. Invariant: a finding is kept as a file, and
//! the failure names it; what a run discovers is kept under `target` and starts the next one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tokenrouter_actors::link::wire::{self, Answer, Parcel};
use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::live::Stamp;
use tokenrouter_core::peer::{Envelope, PeerFrame};
use tokenrouter_gpu::weights::open;
use tokenrouter_gpu::weights::synth::{Shape, Synth};
use tokenrouter_kernels::quant::Format;
use tokenrouter_tests::clients::{run, scratch};

/// Seconds a target runs unless FUZZ_SECONDS says otherwise.
const SECONDS: u64 = 10;
/// Longest input; most seeds are shorter, and what no reader looks at is not in them.
const INPUT_BYTES_MAX: usize = 64 << 10;
/// Memory of a target, MiB; a length that is only claimed must not take more.
const MEMORY_MIB: u32 = 2048;
/// One input may take this long on a busy machine, seconds.
const INPUT_SECONDS_MAX: u32 = 60;
/// A run that did less tested nothing.
const RUNS_MIN: u64 = 200;

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + \
'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
const LLAMA: &str = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}\
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + system + message['content'].strip() + ' [/INST]' }}\
{% elif message.tool_calls is defined %}{% for call in message.tool_calls %}{{ call.function | tojson(indent=2) }}{% endfor %}\
{% else %}{{ message['content'] | trim + eos_token }}{% endif %}{% endfor %}{{ strftime_now('%d %b %Y') }}\
{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}";
const MESSAGES: &str = r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi <|im_end|>"},
{"role":"assistant","content":"","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":{"x":1}}}]},
{"role":"tool","tool_call_id":"a","content":"1"},{"role":"user","content":"and?"}]"#;
const TOOLS: &str = r#"[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"x":{"type":"number"}}}}}]"#;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = root().join(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files of a folder with this ending, in order.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let folder = root().join(folder);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(ending));
    files.sort();
    files
}

fn joined(parts: &[&[u8]]) -> Vec<u8> {
    parts.join(&0)
}

/// The JSON in front of the tensors of a safetensors file.
fn head_of_tensors(path: &Path) -> Vec<u8> {
    let bytes = read(path);
    let len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    bytes[8..8 + len].to_vec()
}

/// A GGUF file without its tensors, as one that is followed by them and as one that is cut.
fn head_of_gguf(path: &Path) -> [Vec<u8>; 2] {
    let tensors = open(path).expect("a good model").weights.total_bytes() as usize;
    let mut head = read(path);
    head.truncate(head.len() - tensors + 64);
    [[&head[..], &[0]].concat(), [&head[..], &[1]].concat()]
}

fn gguf(folder: &Path) -> Vec<Vec<u8>> {
    let byte_level = folder.join("byte-level.gguf");
    if !byte_level.exists() {
        let shape =
            Shape { hidden: 32, layers: 1, heads: 1, kv_heads: 1, head_dim: 32, ffn: 32, vocab: 320, context: 64 };
        let synth = Synth { shape, format: Format::Q8_0, seed: 1 };
        synth.write(&byte_level, &mut |_| {}).expect("a small model can be written");
    }
    let spm = root().join("tests/fixtures/tiny-spm.gguf");
    fs::copy(&spm, folder.join("good.gguf")).expect("it can be copied");
    let mut seeds: Vec<Vec<u8>> = [&spm, &byte_level].into_iter().flat_map(|path| head_of_gguf(path)).collect();
    seeds.push(read("tests/fixtures/quants.gguf"));
    seeds
}

fn safetensors(folder: &Path) -> Vec<Vec<u8>> {
    let tiny = "tests/fixtures/tiny";
    fs::create_dir_all(folder.join("hf")).expect("the scratch folder can be written");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(root().join(tiny).join("qwen3-f16").join(file), folder.join("hf").join(file)).expect("it is copied");
    }
    let models = files(tiny, "").into_iter().filter(|model| model.join("model.safetensors").exists());
    models
        .map(|model| joined(&[&read(model.join("config.json")), &head_of_tensors(&model.join("model.safetensors"))]))
        .collect()
}

fn tokenizer(_: &Path) -> Vec<Vec<u8>> {
    let sentence_piece = r##"{"version":"1.0","added_tokens":[{"id":0,"content":"<unk>","special":true},
{"id":1,"content":"<s>","special":true}],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
{"type":"Replace","pattern":{"String":" "},"content":"▁"}]},"pre_tokenizer":null,"post_processor":{"type":"TemplateProcessing",
"single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}}],
"special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]}}},"decoder":{"type":"Sequence","decoders":[
{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","unk_token":"<unk>","fuse_unk":true,"byte_fallback":true,
"vocab":{"<unk>":0,"<s>":1,"<0x41>":2,"▁":3,"a":4,"b":5,"ab":6,"▁ab":7},"merges":["a b","▁ ab"]}}"##;
    let texts: [&[u8]; 2] = ["a <s>b \u{1f600} abab <|im_start|>".as_bytes(), b"\xff 12345\r\n\t it's"];
    let descriptions = [
        read("tests/fixtures/tiny/qwen3-f16/tokenizer.json"),
        read("config/demo/small/tokenizer.json"),
        sentence_piece.as_bytes().to_vec(),
    ];
    descriptions.iter().flat_map(|description| texts.map(|text| joined(&[description, text]))).collect()
}

fn config(_: &Path) -> Vec<Vec<u8>> {
    let presets = files("config/presets", ".toml").into_iter().chain(files("config/demo", ".toml"));
    let whole = r#"[server]
host = "0.0.0.0"
port = 1
live_max = 3
body_bytes_max = "8 MiB"
api_keys_file = "keys"
admin_key_file = "admin"
insecure = true
drain_ms = 5
[server.tls]
cert = "a"
key = "b"
[router]
name = "r"
algorithm = "bernoulli"
models = ["a", "b"]
[router.params]
p = [[0.5, 0.5], [1.0, 0.0]]
[batching]
policy = "fixed"
max_wait_ms = 3
[batching.thresholds]
a = 4
[[models]]
name = "a"
path = "a.gguf"
threads = 2
kv_memory = 0.5
[[models]]
name = "b"
hf = "who/what"
context_len = 100
"#;
    presets.map(read).chain([whole.as_bytes().to_vec()]).collect()
}

fn link_frames(_: &Path) -> Vec<Vec<u8>> {
    let content =
        |frame: Result<Vec<u8>, wire::WireError>| frame.expect("it can be written")[wire::LENGTH_BYTES..].to_vec();
    let parcel = |frame: PeerFrame| {
        let envelope = Envelope { from: ModelIdx(0), stamp: Stamp { life: 1, seq: 2 }, frame };
        content(wire::encode(&Parcel { to: ModelIdx(1), envelope }))
    };
    let requests = PeerFrame::Requests(Vec::new());
    let mut seeds: Vec<Vec<u8>> = [PeerFrame::Release(RequestId(7)), PeerFrame::Restarted, requests].map(parcel).into();
    seeds.push(content(wire::encode(&Answer::Welcome)));
    seeds.push(content(wire::encode(&Answer::Refused("another version".to_owned()))));
    seeds.push(content(wire::encode(&wire::PROTOCOL)));
    seeds
}

fn body(_: &Path) -> Vec<Vec<u8>> {
    let shared = r#""model":"m","max_tokens":5,"min_tokens":1,"temperature":0.5,"top_p":0.9,"top_k":4,"min_p":0.1,"seed":1,
"n":2,"stop":["a","b"],"stop_token_ids":[1,2],"include_stop_str_in_output":true,"presence_penalty":0.5,"frequency_penalty":-0.5,
"repetition_penalty":1.1,"logit_bias":{"3":-100},"ignore_eos":true,"stream":true,"user":"u","metadata":{"a":"b"},
"stream_options":{"include_usage":true,"continuous_usage_stats":true},"return_token_models":true"#;
    let schema = r#"{"type":"json_schema","json_schema":{"name":"s","strict":true,"schema":{"type":"object","properties":{"a":{"type":"string"}}}}}"#;
    let chats = [
        format!(r#"0{{{shared},"messages":{MESSAGES},"tools":{TOOLS},"tool_choice":"auto","parallel_tool_calls":false}}"#),
        format!(r#"0{{{shared},"messages":{MESSAGES},"logprobs":true,"top_logprobs":20,"response_format":{schema}}}"#),
        r#"0{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_completion_tokens":3,
"chat_template_kwargs":{"enable_thinking":false},"tool_choice":{"type":"function","function":{"name":"f"}}}"#
            .to_owned(),
        format!(r#"1{{{shared},"prompt":"hi","echo":true,"logprobs":3,"suffix":null}}"#),
        r#"1{"model":"m","prompt":[[1,2],[3]],"best_of":1}"#.to_owned(),
        r#"1{"model":"m","prompt":["a","b"],"response_format":{"type":"json_object"}}"#.to_owned(),
        format!(r#"2{{"model":"m","messages":{MESSAGES},"add_generation_prompt":true,"return_token_strs":true}}"#),
        r#"2{"model":"m","prompt":"hi","add_special_tokens":false}"#.to_owned(),
        r#"3{"model":"m","tokens":[1,2,3]}"#.to_owned(),
    ];
    chats.map(String::into_bytes).into()
}

fn template(_: &Path) -> Vec<Vec<u8>> {
    [CHATML, LLAMA].map(|source| joined(&[source.as_bytes(), MESSAGES.as_bytes(), TOOLS.as_bytes()])).into()
}

fn heads(folder: &Path) -> Vec<Vec<u8>> {
    fs::create_dir_all(folder.join("head")).expect("the scratch folder can be written");
    let checkpoints = files("tests/fixtures/heads", ".pt").into_iter().chain(files("tests/fixtures/heads", ".pth"));
    let converted = ["citer", "r2r"].map(|name| {
        let head = root().join("config/demo/heads").join(name);
        joined(&[&read(head.join("head.json")), &head_of_tensors(&head.join("head.safetensors"))])
    });
    checkpoints.map(read).chain(converted).filter(|seed| seed.len() <= INPUT_BYTES_MAX).collect()
}

fn grammar(folder: &Path) -> Vec<Vec<u8>> {
    fs::copy(root().join("tests/fixtures/tiny/qwen3-f16/tokenizer.json"), folder.join("tokenizer.json"))
        .expect("it is copied");
    let forms = [
        r#"{"type":"object","properties":{"a":{"type":"string","maxLength":5,"pattern":"^[a-z]+$"},"b":{"enum":[1,"x",null]}},
"required":["a"],"additionalProperties":false}"#,
        r##"{"anyOf":[{"type":"array","items":{"$ref":"#/$defs/n"},"minItems":1,"maxItems":3},{"const":true}],
"$defs":{"n":{"type":"integer","minimum":-5,"exclusiveMaximum":100}}}"##,
        r#"{"type":["number","boolean"],"multipleOf":0.5,"format":"date-time","oneOf":[{"type":"number"}]}"#,
        "Lstart: \"a\" b* | /[0-9]{1,3}/\nb: \" \" start\n%ignore / /\n",
    ];
    forms.iter().map(|form| joined(&[form.as_bytes(), b"\x01\x20\x40\x7f\xff\x03\x09"])).collect()
}

type Seeds = fn(&Path) -> Vec<Vec<u8>>;

const TARGETS: [(&str, Seeds); 9] = [
    ("gguf", gguf),
    ("safetensors", safetensors),
    ("tokenizer", tokenizer),
    ("config", config),
    ("wire", link_frames),
    ("body", body),
    ("template", template),
    ("heads", heads),
    ("grammar", grammar),
];

/// The words of the seeds, so that the fuzzer need not guess them.
fn dictionary(seeds: &[Vec<u8>]) -> String {
    let mut words = BTreeSet::new();
    for seed in seeds {
        let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-<|>".contains(byte);
        let parts = seed.split(|byte| !is_word(byte)).filter(|word| (3..=32).contains(&word.len()));
        words.extend(parts.map(|word| format!("\"{}\"\n", String::from_utf8_lossy(word))));
    }
    words.into_iter().take(2000).collect()
}

/// Compiles all targets; the workspace's own lock file decides which versions are fuzzed.
fn build() -> PathBuf {
    let (crate_folder, target) = (root().join("tests/fuzz"), scratch("fuzz").join("../.."));
    fs::copy(root().join("Cargo.lock"), crate_folder.join("Cargo.lock")).expect("the lock file can be copied");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--manifest-path"]).arg(crate_folder.join("Cargo.toml"));
    cargo.arg("--target-dir").arg(&target).env("RUSTC_WRAPPER", crate_folder.join("rustc"));
    run(&mut cargo, "the fuzz targets must compile; libfuzzer-sys comes from crates.io and needs a C++ compiler");
    target.join("debug/fuzz-tokenrouter")
}

/// What a run says of itself: `stat::NAME: NUMBER`, or `cov: NUMBER` of the last line that has it.
fn number(said: &str, name: &str) -> u64 {
    let after = said.rsplit(name).next().filter(|_| said.contains(name));
    after.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Runs one target; the last lines of what it said when it found something.
fn fuzz(program: &Path, (name, make): (&str, Seeds), seconds: u64) -> Result<String, String> {
    let folder = scratch("fuzz").join(name);
    for part in ["seeds", "corpus"] {
        fs::create_dir_all(folder.join(part)).expect("the scratch folder can be written");
    }
    let seeds = make(&folder);
    for (number, seed) in seeds.iter().enumerate() {
        fs::write(folder.join(format!("seeds/{number}")), seed).expect("the scratch folder can be written");
    }
    let words = dictionary(&seeds);
    fs::write(folder.join("words"), &words).expect("the scratch folder can be written");
    let mut command = Command::new(program);
    command
        .current_dir(&folder)
        .env("FUZZ_TARGET", name)
        .env("FUZZ_SCRATCH", &folder)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null());
    command.args([format!("-max_total_time={seconds}"), format!("-max_len={INPUT_BYTES_MAX}")]);
    command.args([format!("-rss_limit_mb={MEMORY_MIB}"), format!("-timeout={INPUT_SECONDS_MAX}")]);
    command.args((!words.is_empty()).then_some("-dict=words"));
    command.args(["-print_final_stats=1", "-artifact_prefix=finding-", "corpus", "seeds"]);
    // Findings of earlier runs that are fixed.
    let found_before = root().join("tests/fuzz/regressions").join(name);
    let output = command.args(found_before.exists().then_some(&found_before)).output().expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let (runs, reached) = (number(&said, "stat::number_of_executed_units:"), number(&said, "cov:"));
    let summary = format!("{name:12} {runs:8} inputs, {reached:6} places reached");
    match output.status.success() {
        true if runs >= RUNS_MIN && reached >= 100 => Ok(summary),
        ok => {
            let lines: Vec<&str> = said.lines().collect();
            let end = lines[lines.len().saturating_sub(40)..].join("\n");
            let what =
                if ok { "tested next to nothing" } else { "has a finding, kept as the file that is named below" };
            Err(format!("{summary}\n{name} {what} ({}):\n{end}", folder.display()))
        }
    }
}

#[test]
fn no_input_of_others_breaks_its_reader() {
    let seconds = std::env::var("FUZZ_SECONDS").map_or(SECONDS, |text| text.parse().expect("FUZZ_SECONDS is a number"));
    let only = std::env::var("FUZZ_ONLY").unwrap_or_default();
    let program = build();
    let targets: Vec<_> = TARGETS.into_iter().filter(|(name, _)| only.is_empty() || *name == only).collect();
    assert!(!targets.is_empty(), "FUZZ_ONLY={only:?} names no target");
    let listed = format!("ALL: [(&str, Target); {}]", TARGETS.len());
    assert!(include_str!("../fuzz/src/targets.rs").contains(&listed), "every target has seeds here, and is run");
    let mut findings = Vec::new();
    // Two at a time: a run takes its time whatever it is given.
    for pair in targets.chunks(2) {
        let results = std::thread::scope(|scope| {
            let runs: Vec<_> = pair
                .iter()
                .map(|&target| {
                    scope.spawn({
                        let program = &program;
                        move || fuzz(program, target, seconds)
                    })
                })
                .collect();
            runs.into_iter().map(|run| run.join().expect("the run is told")).collect::<Vec<_>>()
        });
        for result in results {
            result.map_or_else(|finding| findings.push(finding), |summary| println!("{summary}"));
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n\n"));
}
