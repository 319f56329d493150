//! Launch files, good and bad, through one `check` each.

use crate::{
    Bytes, CudaPriority, Device, KvBudget, LaunchFile, MessageFault, MessageFaultKind, Policy, Source, StepFault,
    StepFaultKind,
};
use std::path::{Path, PathBuf};

const PAIR: &str = r#"[server]
port = 9000

[[models]]
name = "large"
path = "large"
threads = 2
kv_memory = "64 MiB"

[[models]]
name = "small"
path = "hf:owner/small"
cores = [0, 1]
kv_tokens = 4096

[router]
name = "pair"
algorithm = "r_stitch"
models = ["small", "large"]

[router.params]
threshold = 0.02

[batching]
policy = "fixed"
thresholds = { large = 4 }
max_wait_ms = 20
"#;

fn parse(text: &str) -> Result<LaunchFile, String> {
    LaunchFile::parse(text, Path::new("folder/launch.toml")).map_err(|error| error.to_string())
}

#[test]
fn a_pair_reads_in_router_order_with_defaults() {
    let file = parse(PAIR).expect("a good file");
    assert_eq!(file.server.host, "127.0.0.1");
    assert_eq!((file.server.port, file.server.live_max), (9000, 64));
    let names: Vec<_> = file.models.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(names, ["small", "large"]);
    assert_eq!(file.models[1].path, Source::Local(PathBuf::from("folder/large")));
    assert_eq!(file.models[1].kv, KvBudget::Memory(Bytes(64 << 20)));
    assert_eq!(file.models[0].kv, KvBudget::Tokens(4096));
    assert_eq!(file.models[0].cores, Some(vec![0, 1]));
    assert_eq!(file.router.params["threshold"], 0.02);
    assert_eq!(file.batching.policy, Policy::Fixed);
    assert_eq!(file.batching.thresholds["large"], 4);
    assert_eq!(file.batching.max_wait_ms, 20);
}

#[test]
fn errors_found_later_have_lines_too() {
    let file = parse(PAIR).expect("a good file");
    for (key, place) in [
        ("router.params.threshold", "22:13"),
        ("models.large.path", "6:8"),
        ("models.small.kv_tokens", "14:13"),
        ("models.small.kv_memory", "10:1"),
        ("server.host", "1:1"),
    ] {
        let error = file.error_at(key, "two\nlines").to_string();
        assert_eq!(error, format!("folder/launch.toml:{place}: two lines"), "{key}");
    }
}

#[test]
fn the_effective_file_reads_back_the_same() {
    for text in [PAIR, CUDA, "[[models]]\nname = \"m\"\npath = \"m.gguf\"\nkv_memory = 1000001\n"] {
        let file = parse(text).expect("a good file");
        let again = LaunchFile::parse(&file.to_toml(), Path::new("launch.toml")).expect("its own output");
        assert_eq!(again.to_toml(), file.to_toml());
        assert_eq!((&again.server, &again.router, &again.batching), (&file.server, &file.router, &file.batching));
        assert_eq!((&again.models, again.cuda), (&file.models, file.cuda));
    }
}

const CUDA: &str = r#"
[cuda]
memory_percent = 80
[[models]]
name = "m"
path = "m.gguf"
device = "cuda:1"
rows_max = 4
[models.cuda]
graph_tokens = [3, 1]
priority = "high"
"#;

#[test]
fn models_on_a_gpu_have_keys_of_their_own() {
    let file = parse(CUDA).expect("a good file");
    assert_eq!(file.models[0].device, Device::Cuda(1));
    let cuda = file.models[0].cuda.clone().expect("defaults");
    assert_eq!((cuda.graph_rows, cuda.graph_tokens), (vec![1, 2, 4], vec![3, 1]), "no more rows than a step has");
    assert_eq!((cuda.graphs, cuda.deterministic, cuda.priority), (true, false, CudaPriority::High));
    assert_eq!(parse(PAIR).expect("a good file").cuda, None);
    for (from, to, expected) in [
        (
            "cuda:1",
            "cuda:x",
            "7:10: models[0].device = \"cuda:x\" is unknown; write \"cpu\", or \"cuda:0\" for the first GPU",
        ),
        ("cuda:1", "cuda:64", "7:10: models[0].device = \"cuda:64\" is out of range; give cuda:0 to cuda:63"),
        (
            "device = \"cuda:1\"",
            "",
            "9:1: models[0].cuda is for models on a CUDA device; set device = \"cuda:0\", or remove the table",
        ),
        ("rows_max = 4", "threads = 4", "8:11: models[0].threads means nothing on cuda:1; remove it"),
        ("rows_max = 4", "cores = [1]", "8:9: models[0].cores means nothing on cuda:1; remove it"),
        (
            "rows_max = 4",
            "kv_format = \"q8\"",
            "8:13: models[0].kv_format = \"q8\" has no CUDA kernels; give \"f16\" or \"bf16\"",
        ),
        ("[3, 1]", "[]", "10:16: models[0].cuda.graph_tokens is empty; list numbers, or set graphs = false"),
        (
            "graph_tokens = [3, 1]",
            "graph_rows = [8]",
            "10:14: models[0].cuda.graph_rows holds 8; give numbers from 1 to 4 (rows_max)",
        ),
        ("[3, 1]", "[0]", "10:16: models[0].cuda.graph_tokens holds 0; give numbers from 1 to 512 (step_tokens_max)"),
        ("= 80", "= 0", "3:18: cuda.memory_percent = 0 is out of range; give 1 to 100"),
    ] {
        let error = parse(&CUDA.replacen(from, to, 1)).expect_err(to);
        assert_eq!(error, format!("folder/launch.toml:{expected}"), "{to}");
    }
    let none = CUDA.split("[models.cuda]").next().unwrap_or_default().replace("cuda:1", "cpu");
    let error = parse(&none).expect_err("no device");
    assert_eq!(
        error,
        "folder/launch.toml:2:1: no model is on a CUDA device; give one device = \"cuda:0\", or remove [cuda]"
    );
}

#[test]
fn formats_of_keys_and_values_read_back() {
    for format in ["f16", "bf16", "f32", "q8"] {
        let text = format!("[[models]]\nname = \"m\"\npath = \"m.gguf\"\nkv_format = \"{format}\"\n");
        let file = parse(&text).expect("a good file");
        assert_eq!(file.models[0].kv_format.name(), format);
        assert!(file.to_toml().contains(&format!("kv_format = \"{format}\"")), "{}", file.to_toml());
    }
}

#[test]
fn the_server_table_reads_back_with_its_files_beside_the_launch_file() {
    let text = "[server]\nbody_bytes_max = \"1 MiB\"\nprompt_tokens_max = 9\nrequest_timeout_ms = 0\nqueue_timeout_ms = 5\n\
                client_timeout_ms = 100\nstall_ms = 1000\nstep_timeout_ms = 0\napi_keys_file = \"keys\"\nadmin_key_file = \"/etc/admin\"\n\
                insecure = true\n[server.tls]\ncert = \"cert.pem\"\nkey = \"key.pem\"\n\
                [[models]]\nname = \"m\"\npath = \"m.gguf\"\n";
    let file = parse(text).expect("a good file");
    let server = &file.server;
    assert_eq!((server.body_bytes_max, server.prompt_tokens_max), (Bytes(1 << 20), 9));
    assert_eq!((server.request_timeout_ms, server.queue_timeout_ms, server.client_timeout_ms), (0, 5, 100));
    assert_eq!((server.stall_ms, server.step_timeout_ms, server.insecure), (1000, 0, true));
    assert_eq!(server.api_keys_file.as_deref(), Some(Path::new("folder/keys")));
    assert_eq!(server.admin_key_file.as_deref(), Some(Path::new("/etc/admin")));
    let tls = server.tls.as_ref().expect("a table");
    assert_eq!((tls.cert.as_path(), tls.key.as_path()), (Path::new("folder/cert.pem"), Path::new("folder/key.pem")));
    let again = LaunchFile::parse(&file.to_toml(), Path::new("launch.toml")).expect("its own output");
    assert_eq!(again.server, file.server);
}

#[test]
fn faults_are_read_as_strictly_as_the_rest() {
    let model = "[[models]]\nname = \"m\"\npath = \"m.gguf\"\n";
    let with = |table: &str| parse(&format!("{model}{table}"));
    assert_eq!(with("").expect("a good file").faults, None);
    let file = with(
        "[[faults.steps]]\nmodel = \"m\"\nkind = \"slow\"\nat = 3\nms = 20\n\
                     [[faults.steps]]\nmodel = \"m\"\nkind = \"stuck\"\nevery = 9\n\
                     [[faults.messages]]\nkind = \"reordered\"\nevery = 5\nseed = 2\n",
    )
    .expect("a good file");
    let faults = file.faults.as_ref().expect("three");
    let step = |kind, at, every, ms| StepFault { model: "m".into(), kind, at, every, ms };
    let steps = [step(StepFaultKind::Slow, Some(3), None, 20), step(StepFaultKind::Stuck, None, Some(9), 1000)];
    assert_eq!(faults.steps, steps);
    assert_eq!(faults.messages, [MessageFault { kind: MessageFaultKind::Reordered, every: 5, seed: 2 }]);
    let again = LaunchFile::parse(&file.to_toml(), Path::new("launch.toml")).expect("its own output");
    assert_eq!(again.faults, file.faults);
    for (table, expected) in [
        ("[faults]\nstep = 1", "5:1: unknown key `step` in [faults]; did you mean `steps`?"),
        ("[faults]\nsteps = 1", "5:9: faults.steps must be an array of tables; write [[faults.steps]]"),
        ("[[faults.steps]]\nkind = \"lost\"\nat = 1", "4:1: [[faults.steps]] has no `model`; add model = \"small\""),
        (
            "[[faults.steps]]\nmodel = \"n\"\nkind = \"lost\"\nat = 1",
            "5:9: faults.steps[0].model names the unknown model `n`; did you mean `m`?",
        ),
        (
            "[[faults.steps]]\nmodel = \"m\"\nkind = \"loss\"\nat = 1",
            "6:8: faults.steps[0].kind = \"loss\" is unknown; did you mean `lost`?",
        ),
        (
            "[[faults.steps]]\nmodel = \"m\"\nkind = \"lost\"",
            "4:1: faults.steps[0] must say when: give at = a step from 0 on, or every = 1 or more, not both",
        ),
        (
            "[[faults.messages]]\nkind = \"lost\"\nevery = 1",
            "6:9: faults.messages[0].every = 1 leaves nothing to go on with; give 2 or more",
        ),
    ] {
        assert_eq!(with(table).expect_err(table), format!("folder/launch.toml:{expected}"), "{table}");
    }
}

#[test]
fn one_model_needs_no_router() {
    let file = parse("[[models]]\nname = \"m\"\npath = \"m.gguf\"\n").expect("a good file");
    assert_eq!((file.router.algorithm.as_str(), file.router.name.as_str()), ("stay", "tokenrouter"));
    assert_eq!(file.router.models, ["m"]);
    assert_eq!(file.batching.policy, Policy::Eager);
}

/// Replaces `from` (which must be there) in the good pair and expects exactly this error.
fn check(from: &str, to: &str, expected: &str) {
    assert!(PAIR.contains(from), "{from}");
    let error = parse(&PAIR.replacen(from, to, 1)).expect_err(to);
    assert_eq!(error, format!("folder/launch.toml:{expected}"), "{to}");
}

#[test]
fn wrong_files_are_refused_with_line_and_remedy() {
    for (from, to, expected) in [
        // unknown keys, at every level
        ("[server]", "[sever]", "1:2: unknown key `sever` in the launch file; did you mean `server`?"),
        ("port", "prot", "2:1: unknown key `prot` in [server]; did you mean `port`?"),
        (
            "port = 9000",
            "api_kyes = [\"k\"]",
            "2:1: unknown key `api_kyes` in [server]; valid: host, port, live_max, prompt_tokens_max, body_bytes_max, request_timeout_ms, queue_timeout_ms, client_timeout_ms, stall_ms, step_timeout_ms, drain_ms, api_keys_file, admin_key_file, insecure, log_format, log_level, tls",
        ),
        (
            "port = 9000",
            "api_key_file = \"k\"",
            "2:1: unknown key `api_key_file` in [server]; did you mean `api_keys_file`?",
        ),
        ("port = 9000", "tls = { crt = \"c\" }", "2:9: unknown key `crt` in [server.tls]; did you mean `cert`?"),
        ("threads", "thread", "7:1: unknown key `thread` in [[models]]; did you mean `threads`?"),
        ("algorithm", "algoritm", "18:1: unknown key `algoritm` in [router]; did you mean `algorithm`?"),
        ("max_wait_ms", "max_wait", "27:1: unknown key `max_wait` in [batching]; did you mean `max_wait_ms`?"),
        ("{ large", "{ larg", "26:16: unknown key `larg` in [batching.thresholds]; did you mean `large`?"),
        (
            "max_wait_ms",
            "zzz",
            "27:1: unknown key `zzz` in [batching]; valid: policy, thresholds, profile, max_wait_ms, execution, prefill_ahead",
        ),
        // wrong types
        ("9000", "\"9000\"", "2:8: server.port must be a whole number, not a string"),
        ("9000", "90000", "2:8: server.port = 90000 is out of range; give 0 to 65535"),
        ("9000", "-1", "2:8: server.port = -1 is out of range; give 0 to 65535"),
        ("threads = 2", "threads = 2.5", "7:11: models[0].threads must be a whole number, not a float"),
        (
            "\"64 MiB\"",
            "true",
            "8:13: models[0].kv_memory must be an amount such as \"512 MiB\" or a number of bytes, not a boolean",
        ),
        (
            "\"64 MiB\"",
            "\"64 mops\"",
            "8:13: models[0].kv_memory = `64 mops` is not an amount of memory; write for example \"512 MiB\" or \"2 GiB\"",
        ),
        ("[0, 1]", "[\"a\"]", "13:9: models[1].cores holds an entry of another type; each must be a whole number"),
        ("\"fixed\"", "\"fixd\"", "25:10: batching.policy = \"fixd\" is unknown; did you mean `fixed`?"),
        (
            "threads = 2",
            "kv_format = \"fp8\"",
            "7:13: models[0].kv_format = \"fp8\" is unknown; valid: f16, bf16, f32, q8",
        ),
        (
            "threads = 2",
            "device = \"cuda\"",
            "7:10: models[0].device = \"cuda\" is unknown; write \"cpu\", or \"cuda:0\" for the first GPU",
        ),
        // missing fields
        ("name = \"large\"\n", "", "4:1: [[models]] has no `name`; add name = \"small\""),
        (
            "path = \"large\"\n",
            "",
            "4:1: [[models]] has no `path`; add path = \"FOLDER\", \"FILE.gguf\" or \"hf:owner/name\"",
        ),
        ("algorithm = \"r_stitch\"\n", "", "16:1: [router] has no `algorithm`; add algorithm = \"r_stitch\""),
        ("port = 9000", "tls = { cert = \"c\" }", "2:7: [server.tls] has no `key`; add key = \"key.pem\""),
        // names
        (
            "name = \"small\"",
            "name = \"large\"",
            "11:8: the name `large` is already taken by models[0]; give every model its own",
        ),
        (
            "[\"small\", \"large\"]",
            "[\"smal\", \"large\"]",
            "19:10: router.models names the unknown model `smal`; did you mean `small`?",
        ),
        (
            "[\"small\", \"large\"]",
            "[\"large\"]",
            "11:8: the model `small` is not in router.models; add it there or remove its table",
        ),
        ("[\"small\", \"large\"]", "[\"large\", \"large\"]", "19:10: router.models names `large` twice; name it once"),
        (
            "name = \"pair\"",
            "name = \"small\"",
            "17:8: router.name = \"small\" is also a model's name; clients could not tell them apart",
        ),
        (
            "name = \"small\"",
            "name = \"sm all\"",
            "11:8: the model name `sm all` contains white space or control characters; use letters, digits and -_./",
        ),
        (
            "hf:owner/small",
            "hf:small",
            "12:8: models[1].path `hf:small` is not of the form hf:owner/name[@revision][:file.gguf]",
        ),
        ("port = 9000", "api_keys_file = 7", "2:17: server.api_keys_file must be a string in quotes, not an integer"),
        ("port = 9000", "insecure = 1", "2:12: server.insecure must be true or false, not an integer"),
        ("port = 9000", "tls = true", "2:7: server.tls must be a table, not a boolean"),
        // values that cannot be
        (
            "port = 9000",
            "body_bytes_max = 1000",
            "2:18: server.body_bytes_max = 1000 is out of range; give 1024 to 1073741824",
        ),
        (
            "port = 9000",
            "request_timeout_ms = 90000000",
            "2:22: server.request_timeout_ms = 90000000 is out of range; give 0 to 86400000",
        ),
        (
            "port = 9000",
            "request_timeout_ms = 10\nqueue_timeout_ms = 11",
            "3:20: server.queue_timeout_ms = 11 is longer than server.request_timeout_ms = 10; lower it, or write 0",
        ),
        (
            "port = 9000",
            "client_timeout_ms = 0",
            "2:21: server.client_timeout_ms = 0 is out of range; give 100 to 3600000",
        ),
        (
            "port = 9000",
            "step_timeout_ms = 99",
            "2:19: server.step_timeout_ms = 99 is out of range; give 100 to 86400000",
        ),
        ("port = 9000", "stall_ms = 99", "2:12: server.stall_ms = 99 is out of range; give 100 to 3600000"),
        (
            "max_wait_ms = 20",
            "max_wait_ms = 60000",
            "1:1: server.stall_ms = 60000 would call a batch stuck that may wait 60000 ms (batching.max_wait_ms); raise it above that",
        ),
        ("threads = 2", "threads = 0", "7:11: models[0].threads = 0 is out of range; give 1 to 1024"),
        ("[0, 1]", "[]", "13:9: models[1].cores is empty; list core numbers such as [0, 1] or leave it out"),
        ("[0, 1]", "[1, 1]", "13:9: models[1].cores names core 1 twice; one worker thread a core"),
        (
            "cores = [0, 1]",
            "cores = [0, 1]\nthreads = 3",
            "13:9: models[1].cores lists 2 cores for 3 threads; list as many cores as threads",
        ),
        ("4096", "7", "14:13: models[1].kv_tokens = 7 holds no request; give room for at least 16 tokens"),
        ("\"64 MiB\"", "0", "8:13: models[0].kv_memory = 0 holds no request; give room for at least 16 tokens"),
        (
            "kv_tokens = 4096",
            "kv_tokens = 4096\nkv_memory = 5",
            "14:13: kv_memory and kv_tokens are both given; keep one of them",
        ),
        ("threads = 2", "step_tokens_max = 8", "7:19: models[0].step_tokens_max = 8 is out of range; give 64 to 65536"),
        ("large = 4", "large = 0", "26:24: batching.thresholds.large = 0 is out of range; give 1 to 64"),
        ("large = 4", "large = 65", "26:24: batching.thresholds.large = 65 is out of range; give 1 to 64"),
        (
            "port = 9000",
            "live_max = 3",
            "26:14: the thresholds can hold back 3 requests but server.live_max is 3; lower them, or raise live_max above 3",
        ),
        (
            "\"fixed\"",
            "\"eager\"",
            "26:14: thresholds have no meaning under policy = \"eager\"; write policy = \"fixed\" or remove them",
        ),
        (
            "\"fixed\"",
            "\"optimal\"",
            "26:14: thresholds have no meaning under policy = \"optimal\"; write policy = \"fixed\" or remove them",
        ),
        (
            "\"fixed\"\nthresholds = { large = 4 }",
            "\"eager\"\nexecution = \"step_sync\"\nprefill_ahead = true",
            "27:17: prefill_ahead needs models that step when they may; write execution = \"async\" or remove it",
        ),
        (
            "\"fixed\"\nthresholds = { large = 4 }",
            "\"optimal\"",
            "25:10: policy = \"optimal\" needs a profile; measure one with `tokenrouter profile`, or write \"adaptive\"",
        ),
        (
            "max_wait_ms = 20",
            "profile = \"p.json\"",
            "27:11: a profile has no meaning under policy = \"fixed\"; write policy = \"optimal\" or \"adaptive\", or remove it",
        ),
        (
            "max_wait_ms = 20",
            "execution = \"sync\"",
            "27:13: batching.execution = \"sync\" is unknown; did you mean `async`?",
        ),
        ("0.02", "1979-05-27", "22:13: router.params.threshold is a date; no parameter is one"),
        ("0.02", "nan", "22:13: router.params.threshold is not a number that can be used"),
        (
            "[router.params]\nthreshold = 0.02",
            "params = 1",
            "21:10: router.params must be a table; write [router.params] above the parameters",
        ),
    ] {
        check(from, to, expected);
    }
}

#[test]
fn files_that_are_not_launch_files() {
    for (text, expected) in [
        ("", ": no model; add a [[models]] table with name = \"…\" and path = \"…\""),
        ("models = []", ":1:10: models is empty; add a [[models]] table with a name and a path"),
        ("[models]\nname = \"m\"", ":1:1: models must be an array of tables; write [[models]], not [models]"),
    ] {
        assert_eq!(parse(text), Err(format!("folder/launch.toml{expected}")), "{text}");
    }
    let broken = parse("[server]\nport = \n").expect_err("no value");
    assert!(broken.starts_with("folder/launch.toml:2:") && broken.lines().count() == 1, "{broken}");
    let twice = parse("[server]\nport = 1\nport = 2\n").expect_err("duplicate key");
    assert!(twice.starts_with("folder/launch.toml:3:1: duplicate key"), "{twice}");
    let two = PAIR.split("[router]").next().unwrap_or_default();
    assert_eq!(
        parse(two).expect_err("two models, no router"),
        "folder/launch.toml:10:1: 2 models but no [router]; add [router] with algorithm = \"r_stitch\", or keep one model"
    );
    let missing = LaunchFile::load(Path::new("no/such/launch.toml")).expect_err("missing").to_string();
    assert!(missing.starts_with("no/such/launch.toml: cannot read the launch file: ") && missing.contains("--config"));
}

/// Every way of cutting, doubling or mangling a byte of a good file gives a file or a one-line error, never a panic.
#[test]
fn mangled_files_never_panic() {
    for at in 0..PAIR.len() {
        for mangled in [
            PAIR[..at].to_owned(),
            format!("{}{}", &PAIR[..at], &PAIR[at + 1..]),
            format!("{}{}{}", &PAIR[..at], "é", &PAIR[at + 1..]),
            format!("{}{}{}", &PAIR[..at], "[", &PAIR[at..]),
        ] {
            if let Err(error) = parse(&mangled) {
                assert!(error.starts_with("folder/launch.toml:") && error.lines().count() == 1, "{error}");
            }
        }
    }
}

/// What is printed can be read, so a table is not deeper than a reader of TOML takes.
#[test]
fn parameters_are_not_nested_without_end() {
    let deep = |levels: usize| PAIR.replace("threshold = 0.02", &format!("{}x = 1", "a.".repeat(levels)));
    let file = LaunchFile::parse(&deep(10), Path::new("folder/launch.toml")).expect("ten levels are read");
    LaunchFile::parse(&file.to_toml(), Path::new("folder/launch.toml")).expect("and what is printed of them");
    let error = parse(&deep(40)).expect_err("forty levels");
    assert!(error.contains("router.params is nested deeper than 16 levels"), "{error}");
}
