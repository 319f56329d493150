//! The data of a launch file. Owner: the launcher. Invariant: see the crate; every default stands here, on its field.

use crate::error::{ConfigError, Places};
use crate::faults::Faults;
use crate::quantity::Bytes;
use crate::source::Source;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// KV memory of a model whose table gives neither `kv_memory` nor `kv_tokens`: 1 GiB, or less where the context
/// lengths of all live requests need less.
pub const DEFAULT_KV_BYTES: Bytes = Bytes(1 << 30);

/// A whole launch file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LaunchFile {
    /// `[server]`
    pub server: Server,
    /// `[router]`
    pub router: Router,
    /// `[batching]`
    pub batching: Batching,
    /// `[faults]`: what goes wrong on order, for tests of the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<Faults>,
    /// `[[models]]`, in the order of `router.models`: the first is the entry model.
    pub models: Vec<Model>,
    #[serde(skip)]
    pub(crate) places: Places,
}

impl LaunchFile {
    /// An error of this file at a key by its dotted path, such as `router.params.threshold`; models are addressed by
    /// name: `models.small.path`. A key the file leaves to its default is reported at its table.
    pub fn error_at(&self, key: &str, message: impl fmt::Display) -> ConfigError {
        self.places.error(key, message)
    }

    /// Where the file is; relative paths in it belong to its folder.
    pub fn path(&self) -> &std::path::Path {
        &self.places.path
    }

    /// The file with every default filled in, as TOML that reads back the same.
    pub fn to_toml(&self) -> String {
        // Serialising plain tables, numbers and strings has no failing case; the text of an impossible error is shown.
        toml::to_string(self).unwrap_or_else(|error| format!("# {error}\n"))
    }
}

/// `[server]`: who may connect and how much is accepted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Server {
    /// Address to listen on; default `127.0.0.1`.
    pub host: String,
    /// TCP port, 0 = any free one; default 8080.
    pub port: u16,
    /// Requests accepted at once, 1 to 65536; more are refused with 429. Default 64.
    pub live_max: u32,
    /// Tokens of the prompts of all live requests together; a request that would exceed it is refused with 429, unless it
    /// is the only one. 0 = no bound, the default.
    pub prompt_tokens_max: u64,
    /// Size of a request body; more is refused with 413. An amount such as `"8 MiB"` (the default), 1 KiB to 1 GiB.
    pub body_bytes_max: Bytes,
    /// How long a request may take in all; then it fails with 504, or with an error event once its stream has begun.
    /// 0 = for ever. Default 3600000 (an hour).
    pub request_timeout_ms: u64,
    /// How long a request may wait for its first token; then it fails with 503. 0 = as long as `request_timeout_ms`, the
    /// default.
    pub queue_timeout_ms: u64,
    /// How long a client may take to send a request body (then 408), or leave a stream unread (then its request is
    /// aborted); default 60000, 100 to 3600000.
    pub client_timeout_ms: u64,
    /// How long work may wait for a step before `/health` turns 503; default 60000, 100 to 3600000, and more than
    /// `batching.max_wait_ms`.
    pub stall_ms: u64,
    /// How long a step of a model may take; then its executor is given up for a new one, and requests are computed again or
    /// fail. 0 = for ever. Default 300000, at least 100: more than any step takes.
    pub step_timeout_ms: u64,
    /// How long a stopping server waits for its requests; default 30000.
    pub drain_ms: u64,
    /// A file with API keys, one a line; a relative path is relative to the launch file. The keys in the environment's
    /// TOKENROUTER_API_KEYS count too. Default: no keys, everybody may ask.
    pub api_keys_file: Option<PathBuf>,
    /// A file with the key for `/admin`; the environment's TOKENROUTER_ADMIN_KEY comes first. Default: none, and `/admin`
    /// answers to clients of this machine only.
    pub admin_key_file: Option<PathBuf>,
    /// Whether other machines may ask although there are no API keys; default false.
    pub insecure: bool,
    /// Form of the log lines on stderr, `human` or `json`; default `human`.
    pub log_format: LogFormat,
    /// A level (`error`, `warn`, `info`, `debug`, `trace`) or a filter such as `info,tokenrouter=debug`;
    /// default `info`. The environment's RUST_LOG and the command line come first.
    pub log_level: String,
    /// `[server.tls]`; default: plain HTTP.
    pub tls: Option<Tls>,
}

/// `[server.tls]`: HTTPS. SIGHUP reads both files again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tls {
    /// PEM file with the certificate and those between it and the root; a relative path is relative to the launch file.
    /// Required.
    pub cert: PathBuf,
    /// PEM file with the private key of the certificate. Required.
    pub key: PathBuf,
}

/// Form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

/// `[[models]]`: one model and the device that runs it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Name in the API, metrics and logs. Required.
    pub name: String,
    /// Folder in Hugging Face layout, `.gguf` file, or `hf:owner/name[@revision][:file.gguf]`; relative paths are
    /// relative to the launch file. Required.
    pub path: Source,
    /// What runs it; default `cpu`.
    pub device: Device,
    /// Worker threads, 1 to 1024; default: as many as `cores` lists, or else every core of the machine.
    pub threads: Option<u32>,
    /// Cores to pin the worker threads to, by number; default: not pinned.
    pub cores: Option<Vec<u32>>,
    /// `kv_memory` (an amount such as `"512 MiB"`, or bytes) or `kv_tokens` (a number of tokens), not both;
    /// default [`DEFAULT_KV_BYTES`].
    #[serde(flatten)]
    pub kv: KvBudget,
    /// Number format of keys and values: `f16`, `bf16`, `f32` or `q8`; default `f16`. `q8` holds 1.8 times the tokens of
    /// `f16` in the same memory; docs/kv-cache.md says what each costs.
    pub kv_format: KvFormat,
    /// Longest sequence in tokens; default: what the model was made for, never more.
    pub context_length: Option<u32>,
    /// Requests in one step at most, 1 to 4096; default 64.
    pub rows_max: u32,
    /// Tokens in one step at most (long prefills are cut into chunks), at least `rows_max`; default 512.
    pub step_tokens_max: u32,
}

/// What runs a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The processor.
    Cpu,
}

/// How much KV memory a model gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// The launcher's choice: see [`DEFAULT_KV_BYTES`].
    Default,
    /// This much memory.
    Memory(Bytes),
    /// Room for this many tokens.
    Tokens(u32),
}

impl Serialize for KvBudget {
    /// As the key a launch file would use, to be flattened into the model's table.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut table = serializer.serialize_map(None)?;
        match self {
            KvBudget::Default => {}
            KvBudget::Memory(bytes) => table.serialize_entry("kv_memory", bytes)?,
            KvBudget::Tokens(tokens) => table.serialize_entry("kv_tokens", tokens)?,
        }
        table.end()
    }
}

/// Number format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// IEEE half precision.
    F16,
    /// The upper half of IEEE single precision.
    Bf16,
    /// IEEE single precision.
    F32,
    /// 8-bit codes with a scale for each 16 dimensions of a head.
    Q8,
}

impl KvFormat {
    /// As in a launch file.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F16 => "f16",
            KvFormat::Bf16 => "bf16",
            KvFormat::F32 => "f32",
            KvFormat::Q8 => "q8",
        }
    }
}

/// `[router]`: who decides which model makes the next token. May be left out of a file with one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Router {
    /// Name under which clients ask for the routed models; default `tokenrouter`.
    pub name: String,
    /// The routing algorithm by name; default `stay` for one model, required for several.
    pub algorithm: String,
    /// The models by name, the entry model first (a small model before a large one); default: all in file order.
    pub models: Vec<String>,
    /// `[router.params]`: the algorithm's own parameters, checked by the algorithm; default empty.
    pub params: serde_json::Map<String, serde_json::Value>,
}

/// `[batching]`: when waiting requests are released as one batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Batching {
    /// `eager` starts as soon as one waits; `fixed` holds back until a model's threshold is reached; `optimal` takes the
    /// thresholds that the throughput model finds best for each number of live requests; `adaptive` starts as `optimal`
    /// and follows what the models do. Default `eager`.
    pub policy: Policy,
    /// With `fixed`: requests that must wait before a model starts, by model name (`small = 1`); a model not named
    /// has 1. The sum of (threshold - 1) stays below `server.live_max`.
    pub thresholds: BTreeMap<String, u32>,
    /// With `optimal` and `adaptive`: what `tokenrouter profile` measured; a relative path is relative to the launch
    /// file. `optimal` needs it; `adaptive` starts from what the algorithm expects without.
    pub profile: Option<PathBuf>,
    /// A batch is released after this long in any case, 0 to 60000; default 50.
    pub max_wait_ms: u64,
    /// `async`: every model steps when it may. `model_sync`: one model steps at a time, the one with the largest batch
    /// first. `auto`: `model_sync` where models share cores, unless the policy is planned or `prefill_ahead` is on;
    /// else `async`. For comparison: `step_sync` (all step together and wait for the slowest), `std_serving` (each hop
    /// is a fresh request). Default `auto`.
    pub execution: Execution,
    /// Whether idle models prefill the prompts of requests that entered at another one; default false.
    pub prefill_ahead: bool,
}

/// How models run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    /// What suits the cores of the models.
    Auto,
    /// Every model steps when it may.
    Async,
    /// One model steps at a time.
    ModelSync,
    /// All step together.
    StepSync,
    /// Each hop is a fresh request.
    StdServing,
}

/// When a batch starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// As soon as one request waits.
    Eager,
    /// At the model's threshold.
    Fixed,
    /// At the planned threshold for so many live requests.
    Optimal,
    /// At a threshold that is planned again as the models behave.
    Adaptive,
}

impl Policy {
    /// As a launch file writes it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Eager => "eager",
            Policy::Fixed => "fixed",
            Policy::Optimal => "optimal",
            Policy::Adaptive => "adaptive",
        }
    }
}
