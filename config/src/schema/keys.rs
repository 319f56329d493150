//! The table itself. Owner: who adds a key. Invariant: a key stands here before the reader can ask for it.

use super::{Default, Key, Kind, Table};
use Default::{Flag, Required, Words};

/// Without a bound of its own.
const ANY: u64 = u64::MAX;
/// A request takes a day at most.
const DAY_MS: u64 = 86_400_000;
/// Longest wait for a client or for a step.
const HOUR_MS: u64 = 3_600_000;

const fn key(name: &'static str, kind: Kind, default: Default, about: &'static str) -> Key {
    Key { name, kind, default, about }
}

const fn whole(least: u64, most: u64) -> Kind {
    Kind::Whole { least, most }
}

/// The whole file.
pub static TOP: Table = Table {
    title: "the launch file",
    about: "A launch file is TOML. What it does not list is refused, with the line and what would be right. \
            `tokenrouter check --config FILE` reads one and prints it with every default filled in.",
    keys: &[
        key("models", Kind::Tables(&MODEL), Required, "The models, one table each."),
        key(
            "router",
            Kind::Table(&ROUTER),
            Words("`stay`, for one model"),
            "Who decides which model makes the next token.",
        ),
        key("batching", Kind::Table(&BATCHING), Words("all defaults"), "When waiting requests start together."),
        key("server", Kind::Table(&SERVER), Words("all defaults"), "Who may connect, and how much is accepted."),
        key("cuda", Kind::Table(&CUDA), Words("all defaults"), "The CUDA devices, where a model is on one."),
        key("faults", Kind::Table(&FAULTS), Words("none"), "What goes wrong on order, for tests of clients."),
    ],
};

pub(crate) static SERVER: Table = Table {
    title: "[server]",
    about: "Who may connect, and how much is accepted. [Operations](../operations.md) shows them at work.",
    keys: &[
        key(
            "host",
            Kind::Text,
            Default::Text("127.0.0.1"),
            "Address to listen on. Another than the machine's own asks for API keys, or `insecure`.",
        ),
        key("port", whole(0, 65_535), Default::Whole(8080), "TCP port; 0 takes any free one."),
        key(
            "live_max",
            whole(1, 65_536),
            Default::Whole(64),
            "Requests accepted at once (each choice is one); more are refused with 429.",
        ),
        key(
            "prompt_tokens_max",
            whole(0, ANY),
            Default::Whole(0),
            "Tokens of the prompts of all live requests together; a request that would exceed it is refused with 429, unless it is the only one. 0 = no bound.",
        ),
        key(
            "body_bytes_max",
            Kind::Amount { least: 1 << 10, most: 1 << 30 },
            Default::Amount("8 MiB"),
            "Size of a request body; more is refused with 413.",
        ),
        key(
            "request_timeout_ms",
            whole(0, DAY_MS),
            Default::Whole(3_600_000),
            "How long a request may take in all; then it fails with 504, or with an error event once its stream has begun. 0 = for ever.",
        ),
        key(
            "queue_timeout_ms",
            whole(0, DAY_MS),
            Default::Whole(0),
            "How long a request may wait for its first token; then it fails with 503. 0 = as long as `request_timeout_ms`, which it may not exceed.",
        ),
        key(
            "client_timeout_ms",
            whole(100, HOUR_MS),
            Default::Whole(60_000),
            "How long a client may take to send a request body (then 408), or leave a stream unread (then its request is aborted).",
        ),
        key(
            "stall_ms",
            whole(100, HOUR_MS),
            Default::Whole(60_000),
            "How long work may wait for a step before `/health` turns 503; more than `batching.max_wait_ms`.",
        ),
        key(
            "step_timeout_ms",
            Kind::ZeroOr { least: 100, most: DAY_MS },
            Default::Whole(300_000),
            "How long a step of a model may take; then its executor is given up for a new one, and requests are computed again or fail. More than any step takes; 0 = for ever.",
        ),
        key("drain_ms", whole(0, ANY), Default::Whole(30_000), "How long a stopping server waits for its requests."),
        key(
            "api_keys_file",
            Kind::File,
            Words("no keys: everybody may ask"),
            "A file with API keys, one a line. Those in the environment's `TOKENROUTER_API_KEYS` count too.",
        ),
        key(
            "admin_key_file",
            Kind::File,
            Words("none: `/admin` answers to clients of this machine"),
            "A file with the key for `/admin`; the environment's `TOKENROUTER_ADMIN_KEY` comes first.",
        ),
        key("insecure", Kind::Flag, Flag(false), "Whether other machines may ask although there are no API keys."),
        key(
            "log_format",
            Kind::Word(&[("human", "for people"), ("json", "one JSON object a line")]),
            Default::Text("human"),
            "Form of the log lines on stderr; `--log-format` comes first.",
        ),
        key(
            "log_level",
            Kind::Text,
            Default::Text("info"),
            "A level (`error`, `warn`, `info`, `debug`, `trace`) or a filter such as `info,tokenrouter=debug`. `--log-level` and the environment's `RUST_LOG` come first.",
        ),
        key("tls", Kind::Table(&TLS), Words("plain HTTP"), "HTTPS."),
    ],
};

pub(crate) static TLS: Table = Table {
    title: "[server.tls]",
    about: "HTTPS. SIGHUP reads both files again.",
    keys: &[
        key("cert", Kind::File, Required, "PEM file with the certificate and those between it and the root."),
        key("key", Kind::File, Required, "PEM file with the private key of the certificate."),
    ],
};

pub(crate) static MODEL: Table = Table {
    title: "[[models]]",
    about: "One model and the device that runs it. Models of one router need the same tokenizer.",
    keys: &[
        key("name", Kind::Name, Required, "Name in the API, in metrics and in logs."),
        key(
            "path",
            Kind::Source,
            Required,
            "Folder in Hugging Face layout, `.gguf` file, or `hf:owner/name[@revision][:file.gguf]`, which is downloaded once.",
        ),
        key(
            "device",
            Kind::Device,
            Default::Text("cpu"),
            "What runs it: `cpu`, or `cuda:0` for the first NVIDIA GPU, `cuda:1` for the second; [GPUs](../cuda.md).",
        ),
        key(
            "threads",
            whole(1, 1024),
            Words("as many as `cores` lists, or else every core"),
            "Worker threads; not on a GPU.",
        ),
        key(
            "cores",
            Kind::Wholes,
            Words("not pinned"),
            "Cores to pin the worker threads to, by number; at least as many as `threads`. Not on a GPU.",
        ),
        key(
            "kv_memory",
            Kind::Amount { least: 1, most: ANY },
            Words(
                "1 GiB, or less where the context lengths of all live requests need less; on a GPU as much as fits, [shared out](../cuda.md#memory)",
            ),
            "Memory for keys and values. Not beside `kv_tokens`.",
        ),
        key(
            "kv_tokens",
            whole(16, u32::MAX as u64),
            Words("as `kv_memory` says"),
            "The same as a number of tokens. Not beside `kv_memory`.",
        ),
        key(
            "kv_format",
            Kind::Word(&[
                ("f16", "IEEE half precision"),
                ("bf16", "the upper half of IEEE single precision"),
                ("f32", "IEEE single precision"),
                ("q8", "8-bit codes with scales: 1.8 times the tokens of `f16` in the same memory"),
            ]),
            Default::Text("f16"),
            "Number format of keys and values; [what each costs](../kv-cache.md). A GPU takes `f16` and `bf16`.",
        ),
        key(
            "context_length",
            whole(2, 1 << 24),
            Words("what the model was made for"),
            "Longest sequence in tokens, never more than the model was made for.",
        ),
        key("rows_max", whole(1, 4096), Default::Whole(64), "Requests in one step at most."),
        key(
            "step_tokens_max",
            whole(1, 65_536),
            Default::Whole(512),
            "Tokens in one step at most, at least `rows_max`; longer prompts are taken in over several steps.",
        ),
        key("cuda", Kind::Table(&MODEL_CUDA), Words("all defaults"), "How it uses its CUDA device."),
    ],
};

pub(crate) static MODEL_CUDA: Table = Table {
    title: "[models.cuda]",
    about: "How a model with `device = \"cuda:…\"` uses its device: [GPUs](../cuda.md).",
    keys: &[
        key(
            "graphs",
            Kind::Flag,
            Flag(true),
            "Steps are recorded at the start and played as CUDA graphs; without, every kernel is launched by itself.",
        ),
        key(
            "graph_rows",
            Kind::Wholes,
            Words("1, 2, 4, 8, 16, up to `rows_max`"),
            "Numbers of requests that are recorded; a step takes the next larger one.",
        ),
        key(
            "graph_tokens",
            Kind::Wholes,
            Words("1, 2, 4, 8, up to `step_tokens_max`"),
            "Numbers of tokens of each request that are recorded: 1 is decoding, more extend a request that returns.",
        ),
        key(
            "deterministic",
            Kind::Flag,
            Flag(false),
            "A request's answer has the same bits alone and in any batch; long prompts take longer.",
        ),
        key(
            "priority",
            Kind::Word(&[
                ("normal", "its work waits for that of models with a high one"),
                ("high", "its work goes first where models share a device"),
            ]),
            Default::Text("normal"),
            "Whose work goes first where models share a device.",
        ),
    ],
};

pub(crate) static CUDA: Table = Table {
    title: "[cuda]",
    about: "The CUDA devices of the machine.",
    keys: &[key(
        "memory_percent",
        whole(1, 100),
        Default::Whole(90),
        "How much of a device's free memory its models may take together; what weights and work leave is shared out as KV memory.",
    )],
};

pub(crate) static ROUTER: Table = Table {
    title: "[router]",
    about: "Who decides which model makes the next token. May be left out of a file with one model.",
    keys: &[
        key("name", Kind::Name, Default::Text("tokenrouter"), "Name under which clients ask for the routed models."),
        key(
            "algorithm",
            Kind::Text,
            Words("`stay` for one model; required for several"),
            "One of the [routing algorithms](routers.md), or one that the program adds.",
        ),
        key(
            "models",
            Kind::Texts,
            Words("all, in the order of the file"),
            "The models by name, all of them; requests enter at the first (a small model before a large one).",
        ),
        key("params", Kind::Open, Words("those of the algorithm"), "The algorithm's own parameters, checked by it."),
    ],
};

pub(crate) static BATCHING: Table = Table {
    title: "[batching]",
    about: "When waiting requests start together: [delayed batching](../batching.md).",
    keys: &[
        key(
            "policy",
            Kind::Word(&[
                ("eager", "a model starts as soon as a request waits"),
                ("fixed", "it holds back until its threshold is reached"),
                ("optimal", "the thresholds that the throughput model finds best for each number of live requests"),
                ("adaptive", "starts as `optimal` and follows what the models do"),
            ]),
            Default::Text("eager"),
            "When a batch starts.",
        ),
        key(
            "thresholds",
            Kind::PerModel { most: 4096 },
            Words("1 for every model"),
            "With `fixed`: requests that must wait before a model starts, by its name (`{ large = 2 }`), at most its `rows_max`. The sum of (threshold - 1) stays below `server.live_max`.",
        ),
        key(
            "profile",
            Kind::File,
            Words("none"),
            "With `optimal`, which needs it, and `adaptive`, which otherwise starts from what the algorithm expects: what `tokenrouter profile` measured.",
        ),
        key("max_wait_ms", whole(0, 60_000), Default::Whole(50), "A batch is released after this long in any case."),
        key(
            "execution",
            Kind::Word(&[
                (
                    "auto",
                    "`model_sync` where models share cores, unless the policy is planned or `prefill_ahead` is on; else `async`",
                ),
                ("async", "every model steps when it may"),
                ("model_sync", "one model steps at a time, the one with the largest batch first"),
                ("step_sync", "all step together and wait for the slowest; for comparison"),
                ("std_serving", "each hop is a fresh request; for comparison"),
            ]),
            Default::Text("auto"),
            "How models run beside each other.",
        ),
        key(
            "prefill_ahead",
            Kind::Flag,
            Flag(false),
            "Whether idle models prefill the prompts of requests that entered at another one; with `async` and `std_serving`.",
        ),
    ],
};

pub(crate) static FAULTS: Table = Table {
    title: "[faults]",
    about: "What goes wrong on order; refused unless the environment has `TOKENROUTER_FAULTS=1`.",
    keys: &[
        key("steps", Kind::Tables(&STEP_FAULT), Words("none"), "Something goes wrong with steps of a model."),
        key(
            "messages",
            Kind::Tables(&MESSAGE_FAULT),
            Words("none"),
            "Something goes wrong with messages between models.",
        ),
    ],
};

pub(crate) static STEP_FAULT: Table = Table {
    title: "[[faults.steps]]",
    about: "Something goes wrong with steps of a model, counted from 0 over all its executors.",
    keys: &[
        key("model", Kind::Name, Required, "Name of the model."),
        key(
            "kind",
            Kind::Word(&[
                ("error", "the step is refused"),
                ("lost", "the device is lost"),
                ("panic", "the executor panics"),
                ("bad_rows", "its rows fail"),
                ("slow", "it takes `ms` longer"),
                ("stuck", "it never ends"),
            ]),
            Required,
            "What goes wrong.",
        ),
        key("at", whole(0, ANY), Words("not given: `every` is"), "In this step."),
        key(
            "every",
            whole(1, ANY),
            Words("not given: `at` is"),
            "In one of so many steps. One of `at` and `every` is given.",
        ),
        key("ms", whole(0, ANY), Default::Whole(1000), "How much longer a slow step takes."),
    ],
};

pub(crate) static MESSAGE_FAULT: Table = Table {
    title: "[[faults.messages]]",
    about: "Something goes wrong with messages between models.",
    keys: &[
        key(
            "kind",
            Kind::Word(&[
                ("lost", "it never arrives"),
                ("duplicate", "it arrives twice"),
                ("reordered", "it arrives after the next one"),
            ]),
            Required,
            "What goes wrong.",
        ),
        key("every", whole(2, u32::MAX as u64), Required, "With one of so many messages, at random."),
        key("seed", whole(0, ANY), Default::Whole(0), "Which ones."),
    ],
};
