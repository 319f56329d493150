//! Devices that are lost, and devices that are too small.

use crate::rig::{Random, Texts, all_needs, alone_on, bits_of, executor, grid, model, options, say, sizes};
use std::sync::Arc;
use tokenrouter_core::executor::{Executor, ExecutorError, Step};
use tokenrouter_gpu::cuda::CudaOptions;
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::load::{self, Device};
use tokenrouter_kernels::cuda::{Devices, DevicesConfig};
use tokenrouter_tests::conformance::{demo, open};
use tokenrouter_tests::cuda_sim::{CudaSim, Streams};

/// What must not be left over.
const KINDS: [&str; 7] = ["memory", "pinned", "stream", "event", "module", "graph", "context"];

fn live(sim: &CudaSim) -> Vec<u64> {
    KINDS.iter().map(|what| sim.live(what)).collect()
}

fn steps(texts: &Texts, random: &mut Random) -> Vec<Step> {
    texts.steps(random).iter().take(12).map(|parts| texts.step(parts, &all_needs())).collect()
}

fn place(devices: &Arc<Devices>, ordinal: usize) -> Device {
    let options = CudaOptions { ordinal, ..options(grid(), true) };
    Device::Cuda(CudaPlace { devices: devices.clone(), options })
}

/// Two models share a device, a third is on another: the first two go down together and come back with the same answers.
#[test]
fn a_lost_device_comes_back_and_others_do_not_notice() {
    let sim = CudaSim::alone().unwrap();
    sim.set_devices(2);
    let (mut random, at_start) = (Random::fresh(), live(&sim));
    let texts = Texts::new(&mut random, 3);
    let steps = steps(&texts, &mut random);
    for (code, streams) in [(700, Streams::Late), (999, Streams::Now)] {
        sim.set_streams(streams);
        let devices = Arc::new(Devices::new(DevicesConfig::default()));
        let models =
            [("small", 0), ("large", 0), ("small", 1)].map(|(name, on)| model(name, sizes(place(&devices, on))));
        let expected = [0, 1, 2].map(|index| bits_of(&models[index], &steps));
        let mut runners = [0, 1, 2].map(|index| executor(&models[index]));
        let half = steps.len() / 2;
        for runner in &mut runners {
            steps[..half].iter().for_each(|step| assert!(runner.step(step).is_ok()));
        }
        sim.lose(0, code);
        let [small, large, other] = &mut runners;
        for runner in [small, large] {
            // However often it is asked.
            for _ in 0..2 {
                let error = runner.step(&steps[half]).expect_err("the device is lost");
                assert!(matches!(&error, ExecutorError::Lost(reason) if reason.contains("cu")), "{error}");
            }
            assert!(runner.last_logits(0).is_none(), "there is nothing to read");
        }
        for step in &steps[half..] {
            other.step(step).unwrap_or_else(|error| panic!("another device: {error}"));
        }
        // The first comes back while the second still holds what was lost.
        let [small, large, other] = runners;
        drop(small);
        assert_eq!(bits_of(&models[0], &steps), expected[0]);
        drop(large);
        assert_eq!(bits_of(&models[1], &steps), expected[1]);
        assert_eq!(bits_of(&models[0], &steps), expected[0], "the second did not take the new context away");
        drop(other);
        assert_eq!(bits_of(&models[2], &steps), expected[2]);
        drop((models, devices));
        assert_eq!(live(&sim), at_start, "{KINDS:?}");
    }
}

/// A kernel that breaks off on the device is told by the step that waited for it.
#[test]
fn a_kernel_that_breaks_off_loses_the_device() {
    let sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    let texts = Texts::new(&mut random, 2);
    let steps = steps(&texts, &mut random);
    let loaded = model("small", sizes(alone_on(options(grid(), true))));
    let expected = bits_of(&loaded, &steps);
    for (code, name) in [(719, "CUDA_ERROR_LAUNCH_FAILED"), (700, "CUDA_ERROR_ILLEGAL_ADDRESS")] {
        let mut runner = executor(&loaded);
        sim.fail("kernel", 1 + random.below(20), code);
        let error = runner.step(&steps[0]).expect_err("a kernel broke off");
        assert!(matches!(&error, ExecutorError::Lost(reason) if reason.contains(name)), "{error}");
        drop(runner);
        assert_eq!(bits_of(&loaded, &steps), expected);
    }
}

/// A step that is too large for the device is refused with the numbers, and nothing is kept.
#[test]
fn a_device_that_is_too_small_is_refused_with_the_numbers() {
    let sim = CudaSim::alone().unwrap();
    let at_start = live(&sim);
    let whole = {
        let loaded = model("large", sizes(alone_on(options(grid(), false))));
        let runner = executor(&loaded);
        let load::AnyRunner::Cuda(runner) = &runner else { panic!("on the device") };
        let (free, total) = runner.kv().memory().array().gpu().memory().unwrap();
        total - free
    };
    assert_eq!(live(&sim), at_start);
    for share in [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99] {
        let bytes = (whole as f64 * share) as u64;
        sim.set_memory(bytes);
        let loaded = load::load_files(&open(&demo("large")), &sizes(alone_on(options(grid(), false))), &mut |_| ());
        let refused = match loaded {
            Ok(loaded) => loaded.executor().err(),
            Err(error) => Some(error),
        };
        let error = refused.unwrap_or_else(|| panic!("{bytes} of {whole} bytes are enough")).to_string();
        assert!(error.contains(" bytes, ") && error.contains(&format!("of {bytes} are free")), "{error}");
        assert!(!error.contains('\n') && error.contains("lower the kv memory"), "{error}");
        assert_eq!(live(&sim), at_start, "{KINDS:?} after {error}");
    }
    sim.set_memory(whole + (1 << 20));
    let loaded = model("large", sizes(alone_on(options(grid(), false))));
    let texts = Texts::new(&mut Random::fresh(), 1);
    let step = texts.step(&[(0, 0..3)], &all_needs());
    say(&mut executor(&loaded), &step).unwrap();
}
