//! The whole server over models on CUDA devices, on the software device: answers, devices that are lost under load, ordered
//! faults, presets, and what is refused before anything is loaded. Owner: the CUDA executor and the launcher.
#![cfg(target_os = "linux")]

use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokenrouter::launch::{self, Environment, Overrides, Plan};
use tokenrouter::progress::Progress;
use tokenrouter_tests::cuda_sim::CudaSim;
use tokenrouter_tests::http_server::Server;
use tokenrouter_tests::raw_client::{Answer, CHAT, TEXT, get, post};

/// What recovers does so within this time, on a busy machine as well.
const SOON: Duration = Duration::from_secs(30);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A folder for launch files and compiled kernels, gone at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("tokenrouter-cuda-serve-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder takes folders");
        Folder(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("the folder takes files");
        path
    }

    /// Kernels of the software device must not lie where those of real ones are looked for.
    fn environment(&self) -> Environment {
        Environment { cache: self.0.join("cache"), ..Environment::read() }
    }

    fn launch(&self, text: &str) -> Server {
        Server::launch_in(self.write("launch.toml", text), self.environment())
    }

    /// What `tokenrouter check` does until it knows whether the models can be launched.
    fn prepare(&self, text: &str) -> Result<Plan, (u8, String)> {
        let (environment, path) = (self.environment(), self.write("launch.toml", text));
        let file = launch::read(Some(&path), &Overrides::default(), &environment);
        let plan = file.and_then(|file| launch::prepare(file, &environment, &Progress::hidden()));
        plan.map_err(|error| (error.exit_code(), error.to_string().replace(&path.display().to_string(), "launch.toml")))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left_over = fs::remove_dir_all(&self.0);
    }
}

/// Memory and shapes of a model in these tests: few, so that tests are quick.
const SMALL_SHAPES: &str = "rows_max = 8\nstep_tokens_max = 64\n";
const GRAPHS: &str = "[models.cuda]\ngraph_rows = [1, 4]\ngraph_tokens = [1, 4]\ndeterministic = true\n";

fn model(name: &str, device: &str) -> String {
    let path = root().join("config/demo").join(name);
    let cuda = if device == "cpu" { "threads = 1\n" } else { GRAPHS };
    let memory = "kv_memory = \"4 MiB\"\n";
    format!(
        "[[models]]\nname = \"{name}\"\npath = \"{}\"\ndevice = \"{device}\"\n{memory}{SMALL_SHAPES}{cuda}",
        path.display()
    )
}

fn pair((small, large): (&str, &str)) -> String {
    let router = "[router]\nname = \"demo\"\nalgorithm = \"r_stitch\"\nmodels = [\"small\", \"large\"]\n\
                  [router.params]\nthreshold = 0.05\n";
    format!("{router}{}{}", model("small", small), model("large", large))
}

/// Requests to the pair and to each of its models, each with one right answer: greedy as a rule, some drawn from a seed, one
/// with a form.
fn requests() -> Vec<(&'static str, Value)> {
    let problems = fs::read_to_string(root().join("config/demo/problems.jsonl")).expect("the problems");
    let problems = problems.lines().map(|line| serde_json::from_str::<Value>(line).expect("a problem"));
    let request = |(at, problem): (usize, Value)| {
        let model = ["demo", "small", "demo", "large"][at % 4];
        let base = json!({"model": model, "max_tokens": 40, "temperature": 0, "stream": at % 3 == 0});
        let mut body = base;
        if at % 4 == 2 {
            (body["temperature"], body["top_p"], body["seed"]) = (json!(0.7), json!(0.95), json!(at));
        }
        if at == 4 {
            body["response_format"] = json!({"type": "json_object"});
        }
        let question = problem["question"].as_str().expect("a question");
        if at % 2 == 0 {
            body["messages"] = json!([{"role": "user", "content": question}]);
            return (CHAT, body);
        }
        body["prompt"] = json!(format!("Question: {question}\nAnswer:"));
        (TEXT, body)
    };
    problems.take(8).enumerate().map(request).collect()
}

/// All ask at the same time.
fn ask_all(address: SocketAddr, requests: &[(&'static str, Value)]) -> Vec<Answer> {
    std::thread::scope(|scope| {
        let asking: Vec<_> =
            requests.iter().map(|(path, body)| scope.spawn(move || post(address, path, body))).collect();
        asking.into_iter().map(|answer| answer.join().expect("an answer")).collect()
    })
}

fn texts(answers: &[Answer]) -> Vec<String> {
    answers.iter().map(|answer| answer.said().text).collect()
}

/// What the pair says on the processor.
fn expected(folder: &Folder, requests: &[(&'static str, Value)]) -> Vec<String> {
    let server = folder.launch(&pair(("cpu", "cpu")));
    let said = texts(&ask_all(server.address, requests));
    server.stop();
    said
}

#[test]
fn a_pair_on_one_device_on_two_or_on_half_a_device_says_what_it_says_on_the_processor() {
    let sim = CudaSim::alone().unwrap();
    sim.set_devices(2);
    let (folder, requests) = (Folder::new("answers"), requests());
    let expected = expected(&folder, &requests);
    assert!(expected.iter().filter(|text| text.len() > 20).count() >= 6, "{expected:?}");
    for devices in [("cuda:0", "cuda:0"), ("cuda:1", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:1")] {
        let server = folder.launch(&pair(devices));
        // Together, and one after the other: the same tokens.
        assert_eq!(texts(&ask_all(server.address, &requests)), expected, "{devices:?}");
        for (request, text) in requests.iter().zip(&expected).take(3) {
            assert_eq!(texts(&ask_all(server.address, std::slice::from_ref(request))), [text.as_str()], "{devices:?}");
        }
        assert_eq!(get(server.address, "/health").status, 200);
        server.stop();
    }
}

/// Whether an answer is right; else it must be an error, or a beginning of what is right that ends with one.
#[track_caller]
fn is_right(answer: &Answer, right: &str) -> bool {
    if answer.status != 200 {
        assert_eq!(answer.status, 500, "{}", answer.text);
        return false;
    }
    let is_stream = answer.text.starts_with("data:");
    let failed = is_stream && answer.events().last().is_some_and(|event| event["error"].is_object());
    let said = answer.said().text;
    assert!(if failed { right.starts_with(&said) } else { said == right }, "{said:?} of {right:?}");
    !failed
}

async fn restarts(server: &Server, model: &str) -> f64 {
    server.metric(&format!("tokenrouter:executor_restarts_total{{model_name=\"{model}\"}}")).await
}

/// A device is lost while it works: the models on it are put there again, the other device's model does not notice.
#[actix_rt::test]
async fn a_device_that_is_lost_under_load_comes_back() {
    let sim = CudaSim::alone().unwrap();
    sim.set_devices(2);
    let (folder, requests) = (Folder::new("lost"), requests());
    let expected = expected(&folder, &requests);
    for (devices, both, codes) in [(("cuda:0", "cuda:0"), true, &[700, 719][..]), (("cuda:0", "cuda:1"), false, &[999])]
    {
        let server = folder.launch(&pair(devices));
        for (round, code) in codes.iter().copied().enumerate() {
            let answers = std::thread::scope(|scope| {
                let asking = scope.spawn(|| ask_all(server.address, &requests));
                let started = sim.calls("cuGraphLaunch");
                let begin = Instant::now();
                while sim.calls("cuGraphLaunch") < started + 20 && begin.elapsed() < SOON {
                    std::thread::yield_now();
                }
                sim.lose(0, code);
                asking.join().expect("answers")
            });
            let right = answers.iter().zip(&expected).filter(|(answer, right)| is_right(answer, right)).count();
            // A step that fails as a whole is tried again.
            assert_eq!(right, requests.len(), "{devices:?} {code}");
            server.idle_within(SOON, "after the loss").await;
            assert_eq!(get(server.address, "/health").status, 200);
            let lost = 1.0 + round as f64;
            assert!(restarts(&server, "small").await >= lost, "{devices:?} {code}");
            assert_eq!(restarts(&server, "large").await >= 1.0, both, "{devices:?} {code}");
            assert_eq!(texts(&ask_all(server.address, &requests)), expected, "{devices:?} {code}");
        }
        server.stop();
    }
}

/// A launch file's faults strike executors on a device as they do others.
#[actix_rt::test]
async fn ordered_faults_strike_a_device() {
    let _sim = CudaSim::alone().unwrap();
    let (folder, requests) = (Folder::new("faults"), requests());
    let expected = expected(&folder, &requests);
    let fault = |model, kind, at| format!("[[faults.steps]]\nmodel = \"{model}\"\nkind = \"{kind}\"\nat = {at}\n");
    let faults = [fault("small", "lost", 3), fault("small", "panic", 9), fault("large", "error", 2)].concat();
    let server = folder.launch(&format!("{}{faults}", pair(("cuda:0", "cuda:0"))));
    assert_eq!(texts(&ask_all(server.address, &requests)), expected);
    assert_eq!((restarts(&server, "small").await, restarts(&server, "large").await), (2.0, 0.0));
    server.stop();
}

/// A preset with its paths as seen from another folder.
fn preset(name: &str) -> String {
    let text = fs::read_to_string(root().join("config/presets").join(name)).expect("the preset");
    text.replace("path = \"../demo", &format!("path = \"{}", root().join("config/demo").display()))
}

#[test]
fn the_demo_preset_starts() {
    let _sim = CudaSim::alone().unwrap();
    let (folder, requests) = (Folder::new("preset"), requests());
    let server = folder.launch(&preset("demo-cuda.toml"));
    let found = texts(&ask_all(server.address, &requests));
    server.stop();
    assert_eq!(found, expected(&folder, &requests));
}

/// Networks that score tokens route as they do on the processor.
#[test]
fn learned_heads_route_as_on_the_processor() {
    let _sim = CudaSim::alone().unwrap();
    let (folder, requests) = (Folder::new("heads"), requests());
    for name in ["demo-r2r.toml", "demo-citer.toml"] {
        let text =
            preset(name).replace("head = \"../demo", &format!("head = \"{}", root().join("config/demo").display()));
        let said = |text: &str| {
            let server = folder.launch(text);
            let said = ask_all(server.address, &requests[..4]);
            let usage: Vec<Value> =
                said.iter().map(|answer| answer.said().usage["completion_tokens_details"].clone()).collect();
            server.stop();
            (texts(&said), usage)
        };
        let cuda = format!(
            "device = \"cuda:0\"\n{SMALL_SHAPES}cuda = {{ graph_rows = [1, 4], graph_tokens = [1, 4], deterministic = true }}"
        );
        let (on_cpu, on_cuda) = (said(&text), said(&text.replace("threads = 1", &cuda)));
        assert_eq!(on_cpu, on_cuda, "{name}");
        assert!(on_cpu.1.iter().any(|usage| usage["by_model"]["large"].as_u64() > Some(0)), "{name}: {:?}", on_cpu.1);
    }
}

/// The preset of the large pair, with tiny models that claim as long a context in place of its downloads.
#[test]
fn the_preset_of_qwen3_starts() {
    let _sim = CudaSim::alone().unwrap();
    let folder = Folder::new("qwen3");
    let mut text = preset("qwen3-0.6b-32b-cuda.toml");
    for (hub, tiny) in [("hf:Qwen/Qwen3-0.6B", "qwen3-f16"), ("hf:Qwen/Qwen3-32B", "qwen3-bf16-untied")] {
        let (from, to) = (root().join("tests/fixtures/tiny").join(tiny), folder.0.join(tiny));
        fs::create_dir_all(&to).expect("the folder takes folders");
        for file in fs::read_dir(from).expect("the tiny models").flatten() {
            fs::copy(file.path(), to.join(file.file_name())).expect("copied");
        }
        let config = fs::read_to_string(to.join("config.json")).expect("a configuration");
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        config["max_position_embeddings"] = json!(40960);
        fs::write(to.join("config.json"), config.to_string()).expect("written");
        assert!(text.contains(hub), "{text}");
        text = text.replace(hub, &to.display().to_string());
    }
    // As many tokens as there is room for are more than a test wants to fill.
    let server = folder.launch(&text.replace("memory_percent = 95", "memory_percent = 30"));
    for model in ["qwen3-0.6b-32b", "qwen3-0.6b", "qwen3-32b"] {
        let body = json!({"model": model, "prompt": "a", "max_tokens": 4, "ignore_eos": true, "temperature": 0});
        assert_eq!(post(server.address, TEXT, &body).said().completion_tokens(), 4, "{model}");
    }
    server.stop();
}

/// What a machine lacks is one line that names the place, the numbers and the remedy; the exit code is 2.
#[test]
fn what_a_machine_lacks_is_one_line() {
    let sim = CudaSim::alone().unwrap();
    let folder = Folder::new("check");
    let refused = |text: &str| folder.prepare(text).err().expect("the machine lacks something");
    let (one, seven) = (pair(("cpu", "cuda:0")), pair(("cpu", "cuda:7")));
    let at = one.lines().position(|line| line == "device = \"cuda:0\"").expect("the device") + 1;
    let line = |what: &str| (2, format!("launch.toml:{at}:10: model `large`: {what}"));
    sim.set_driver(11080);
    let old = "the NVIDIA driver supports CUDA 11.8, at least 12.0 is needed; update the driver";
    assert_eq!(refused(&one), line(old));
    sim.set_driver(12080);
    sim.set_devices(0);
    let (code, none) = refused(&one);
    assert!(code == 2 && none.ends_with("; set device = \"cpu\"") && none.contains("finds no device ("), "{none}");
    sim.set_devices(1);
    assert_eq!(refused(&seven), line("device cuda:7 does not exist; this machine has cuda:0"));
    sim.set_devices(3);
    assert_eq!(refused(&seven), line("device cuda:7 does not exist; this machine has cuda:0 to cuda:2"));
    sim.set_devices(1);
    sim.set_capability(7, 5);
    let old =
        "Software Device 0 has compute capability 7.5, the kernels need 8.0 (Ampere) or newer; set device = \"cpu\"";
    assert_eq!(refused(&one), line(old));
    sim.set_capability(9, 0);
    assert!(folder.prepare(&one).is_ok());
}

/// Numbers in a text, with their units if they have any: `12.5 MiB` is 12.5.
fn number_after(text: &str, words: &str) -> f64 {
    let rest = text.split_once(words).unwrap_or_else(|| panic!("no {words:?} in {text}")).1;
    let number = rest.trim_start().split(' ').next().expect("a number");
    number.trim_end_matches([';', ',']).parse().unwrap_or_else(|error| panic!("{number:?}: {error}"))
}

/// The plan of a device: models without sizes of their own get room for the same number of tokens, all of it is within the
/// budget, and a budget that is too small is refused with a sum that is right.
#[test]
fn memory_is_shared_out_and_a_plan_that_does_not_fit_shows_its_sum() {
    let sim = CudaSim::alone().unwrap();
    let folder = Folder::new("plan");
    let shared = |percent| {
        let pair = pair(("cuda:0", "cuda:0")).replace("kv_memory = \"4 MiB\"\n", "");
        format!("[server]\nlive_max = 4096\n[cuda]\nmemory_percent = {percent}\n{pair}")
    };
    let mut before = 0;
    for percent in [20, 40] {
        let plan = folder.prepare(&shared(percent)).unwrap();
        let pages: Vec<u32> = plan.models.iter().map(|model| model.limits.pages).collect();
        assert_eq!(pages[0], pages[1], "room for the same number of tokens");
        assert!(pages[0] > before, "{percent} %: {pages:?}");
        before = pages[0];
        let loaded: Vec<_> = plan
            .models
            .iter()
            .map(|model| tokenrouter_gpu::load::load_files(&model.files, &model.options, &mut |_| ()).unwrap())
            .collect();
        let _executors: Vec<_> = loaded.iter().map(|model| model.executor().unwrap()).collect();
    }
    sim.set_memory(40 << 20);
    let (code, text) = folder.prepare(&pair(("cuda:0", "cuda:0")).replace("4 MiB", "30 MiB")).err().expect("too much");
    assert!(code == 2 && !text.contains('\n'), "{text}");
    assert!(
        text.starts_with("launch.toml:")
            && text.contains(": cuda:0 has 40.0 MiB free, models may take 36.0 MiB; small: ")
    );
    let mut all = 0.0;
    for model in ["small", "large"] {
        let part = text.split_once(&format!("; {model}: ")).expect("each model").1;
        let part = part.split(';').next().expect("its sum");
        let [weights, workspace, graphs] = ["weights", "workspace", "graphs"].map(|what| number_after(part, what));
        let kv = part.split_once(" tokens ").map(|(_, rest)| number_after(rest, "")).expect("keys and values");
        let sum = number_after(part, "=");
        assert!((weights + workspace + graphs + kv - sum).abs() < 0.3, "{part}");
        assert!((29.0..=30.0).contains(&kv), "{part}");
        all += sum;
    }
    assert!((number_after(&text, "together") - all).abs() < 0.3, "{text}");
    assert!(text.ends_with(
        "lower kv_tokens, kv_memory, step_tokens_max or rows_max, or use smaller weights or another device"
    ));
}
