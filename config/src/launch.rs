//! The data of a launch file. Owner: the launcher. Invariant: see the crate; what a key means, its range and its default
//! stand in [`crate::schema`].

use crate::cuda::{Cuda, Device, ModelCuda};
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
    /// `[cuda]`; there exactly if a model is on a CUDA device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda: Option<Cuda>,
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
    /// Address to listen on.
    pub host: String,
    /// TCP port, 0 = any free one.
    pub port: u16,
    /// Requests accepted at once.
    pub live_max: u32,
    /// Tokens of the prompts of all live requests together; 0 = no bound.
    pub prompt_tokens_max: u64,
    /// Size of a request body.
    pub body_bytes_max: Bytes,
    /// How long a request may take in all; 0 = for ever.
    pub request_timeout_ms: u64,
    /// How long a request may wait for its first token; 0 = as long as `request_timeout_ms`.
    pub queue_timeout_ms: u64,
    /// How long a client may take to send a body, or leave a stream unread.
    pub client_timeout_ms: u64,
    /// How long work may wait for a step before `/health` turns 503.
    pub stall_ms: u64,
    /// How long a step of a model may take; 0 = for ever.
    pub step_timeout_ms: u64,
    /// How long a stopping server waits for its requests.
    pub drain_ms: u64,
    /// A file with API keys.
    pub api_keys_file: Option<PathBuf>,
    /// A file with the key for `/admin`.
    pub admin_key_file: Option<PathBuf>,
    /// Whether other machines may ask although there are no API keys.
    pub insecure: bool,
    /// Form of the log lines on stderr.
    pub log_format: LogFormat,
    /// A level or a filter of log lines.
    pub log_level: String,
    /// `[server.tls]`; without it plain HTTP.
    pub tls: Option<Tls>,
}

/// `[server.tls]`: HTTPS. SIGHUP reads both files again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tls {
    /// PEM file with the certificate and those between it and the root.
    pub cert: PathBuf,
    /// PEM file with the private key of the certificate.
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
    /// Name in the API, metrics and logs.
    pub name: String,
    /// Where its files are.
    pub path: Source,
    /// What runs it.
    pub device: Device,
    /// Worker threads; without it as many as `cores` lists, or else every core.
    pub threads: Option<u32>,
    /// Cores to pin the worker threads to.
    pub cores: Option<Vec<u32>>,
    /// `kv_memory` or `kv_tokens`, or neither: [`DEFAULT_KV_BYTES`].
    #[serde(flatten)]
    pub kv: KvBudget,
    /// Number format of keys and values.
    pub kv_format: KvFormat,
    /// Longest sequence in tokens; without it what the model was made for.
    pub context_length: Option<u32>,
    /// Requests in one step at most.
    pub rows_max: u32,
    /// Tokens in one step at most.
    pub step_tokens_max: u32,
    /// `[models.cuda]`; there exactly if the device is a CUDA device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda: Option<ModelCuda>,
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
    /// Name under which clients ask for the routed models.
    pub name: String,
    /// The routing algorithm by name.
    pub algorithm: String,
    /// The models by name, the entry model first.
    pub models: Vec<String>,
    /// `[router.params]`: the algorithm's own parameters, checked by it.
    pub params: serde_json::Map<String, serde_json::Value>,
}

/// `[batching]`: when waiting requests are released as one batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Batching {
    /// When a batch starts.
    pub policy: Policy,
    /// With `fixed`: requests that must wait before a model starts, by its name; 1 for a model not named.
    pub thresholds: BTreeMap<String, u32>,
    /// With `optimal` and `adaptive`: what `tokenrouter profile` measured.
    pub profile: Option<PathBuf>,
    /// A batch is released after this long in any case.
    pub max_wait_ms: u64,
    /// How models run beside each other.
    pub execution: Execution,
    /// Whether idle models prefill the prompts of requests that entered at another one.
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
