//! Loading: facts reported, limits derived, and everything impossible refused with its numbers.

mod common;

use common::*;
use tokenrouter_core::executor::Executor;
use tokenrouter_gpu::load::{KvMemory, LoadError, LoadOptions, LoadedModel, Progress, load};
use tokenrouter_gpu::ops::KvFormat;

fn try_load(options: &LoadOptions) -> Result<LoadedModel, LoadError> {
    load(&Tiny::new("llama").model(1).write(), options, &mut |_| ())
}

fn fault(options: LoadOptions) -> String {
    try_load(&options).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn facts_and_progress_are_reported() {
    let dir = Tiny::new("llama").model(1).write();
    let mut seen: Vec<Progress> = Vec::new();
    let model = load(&dir, &options(1, KvFormat::F16), &mut |progress| seen.push(progress)).unwrap();
    let info = model.info();
    assert_eq!(info.architecture, "llama");
    assert_eq!(Some(info.name.as_str()), dir.file_name().and_then(|name| name.to_str()));
    assert_eq!((info.context_len, info.vocab_width), (256, 150));
    assert_eq!(info.eos, [2]);
    assert_eq!(info.kv_bytes_per_token, 2 * 2 * 2 * 16 * 2);
    let parameters = 150 * 64 + 64 + 2 * (2 * 64 + 64 * 64 * 2 + 2 * 32 * 64 + 3 * 96 * 64);
    assert_eq!(info.parameters, parameters);
    assert_eq!(info.weight_bytes, 4 * parameters);
    assert!(seen.windows(2).all(|pair| pair[0].bytes <= pair[1].bytes));
    assert_eq!(seen.last(), Some(&Progress { bytes: 4 * parameters, total: 4 * parameters }));
}

#[test]
fn limits_follow_the_options() {
    let kv = KvMemory::Bytes(16 * 256 * 10 + 5);
    let model = try_load(&LoadOptions { kv, context_len: Some(100), ..options(1, KvFormat::F16) }).unwrap();
    let limits = model.executor().unwrap().limits();
    assert_eq!(limits, model.limits());
    assert_eq!((limits.pages, limits.context_len, limits.rows_max, limits.step_tokens_max), (10, 100, 8, 128));
    let wide = try_load(&LoadOptions { kv, ..options(1, KvFormat::F32) }).unwrap();
    assert_eq!(wide.limits().pages, 5);
    let narrow = try_load(&LoadOptions { kv, ..options(1, KvFormat::Q8) }).unwrap();
    // 18 bytes for 16 numbers of a head: two layers, two heads, keys and values.
    assert_eq!((narrow.info().kv_bytes_per_token, narrow.limits().pages), (8 * 18, 17));
    assert_eq!(narrow.work().unwrap().kv_bytes, 8 * 18);
}

#[test]
fn impossible_wishes_are_refused_with_their_numbers() {
    let base = || options(1, KvFormat::F16);
    let text = fault(LoadOptions { kv: KvMemory::Bytes(1000), ..base() });
    assert!(text.contains("1000 bytes") && text.contains("4096 bytes") && text.contains("65536 bytes"), "{text}");
    let text = fault(LoadOptions { kv: KvMemory::Bytes(1 << 50), ..base() });
    assert!(text.contains("available") && text.contains("kv memory"), "{text}");
    let text = fault(LoadOptions { context_len: Some(257), ..base() });
    assert!(text.contains("257") && text.contains("256"), "{text}");
    let text = fault(LoadOptions { rows_max: 0, ..base() });
    assert!(text.contains("rows_max"), "{text}");
    let text = fault(LoadOptions { cores: Some(vec![100_000]), ..base() });
    assert!(text.contains("core 100000"), "{text}");
}

#[test]
fn models_are_shared_between_threads_and_executors_move_to_theirs() {
    fn shared<T: Send + Sync>(_: &T) {}
    fn movable<T: Send>(value: T) -> T {
        value
    }
    let model = try_load(&options(1, KvFormat::F16)).unwrap();
    shared(&model);
    let mut runner = movable(model.executor().unwrap());
    let steps = std::thread::spawn(move || run(&mut runner, vec![row(1, 0, &[1], &[0])]).len());
    assert_eq!(steps.join().unwrap(), 1);
}

#[test]
fn an_executor_pins_the_thread_that_steps() {
    let core = tokenrouter_kernels::sys::usable_cores()[0];
    let model = try_load(&LoadOptions { cores: Some(vec![core]), ..options(2, KvFormat::F16) }).unwrap();
    let mut runner = model.executor().unwrap();
    let cores = std::thread::spawn(move || {
        run(&mut runner, vec![row(1, 0, &[1], &[0])]);
        tokenrouter_kernels::sys::usable_cores()
    });
    if cfg!(target_os = "linux") {
        assert_eq!(cores.join().unwrap(), [core]);
    }
}
