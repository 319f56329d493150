//! Which cores the models of a launch file step on, and whether they are in each other's way. Owner: the launcher.

use tokenrouter_config::{self as config, Device, LaunchFile, Model, Policy};
use tokenrouter_core::execution::Execution;
use tokenrouter_kernels::sys;

/// Worker threads of a model; 0 = one for every usable core.
pub(super) fn threads(model: &Model) -> usize {
    model.threads.map_or_else(|| model.cores.as_ref().map_or(0, Vec::len), |threads| threads as usize)
}

/// How the models run beside each other. Two models that step at the same time on the same cores wait for each other's
/// threads within every operation, so where that can happen `auto` lets them take turns; but not under thresholds that
/// are planned for models that step when they may, nor where idle models have something to do.
pub(super) fn execution(file: &LaunchFile) -> Execution {
    match file.batching.execution {
        config::Execution::Auto => {
            let is_planned = matches!(file.batching.policy, Policy::Optimal | Policy::Adaptive);
            let wants_turns = !is_planned && !file.batching.prefill_ahead;
            if wants_turns && share(&file.models, sys::usable_cores().len()) {
                tracing::info!("the models share cores, so they take turns; batching.execution = \"async\" ends that");
                return Execution::ModelSync;
            }
            Execution::Async
        }
        config::Execution::Async => Execution::Async,
        config::Execution::ModelSync => Execution::ModelSync,
        config::Execution::StepSync => Execution::StepSync,
        config::Execution::StdServing => Execution::StdServing,
    }
}

/// Whether models would share some of `usable` cores if all stepped at once: two are pinned to the same core, or there
/// are more threads than cores. Models on other devices need no core to step on.
fn share(models: &[Model], usable: usize) -> bool {
    let models: Vec<&Model> = models.iter().filter(|model| model.device == Device::Cpu).collect();
    let all = models.iter().map(|model| if threads(model) == 0 { usable } else { threads(model) });
    let mut pinned: Vec<u32> = models.iter().flat_map(|model| model.cores.iter().flatten().copied()).collect();
    let listed = pinned.len();
    pinned.sort_unstable();
    pinned.dedup();
    models.len() > 1 && (all.sum::<usize>() > usable || pinned.len() < listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(lines: [&str; 2]) -> Vec<Model> {
        let model =
            |(name, lines): (&str, &str)| format!("[[models]]\nname = \"{name}\"\npath = \"m.gguf\"\n{lines}\n");
        let text = ["a", "b"].into_iter().zip(lines).map(model).collect::<String>();
        let text = format!("{text}[router]\nalgorithm = \"bernoulli\"\nparams = {{ p = 0.5 }}\n");
        LaunchFile::parse(&text, std::path::Path::new("launch.toml")).expect("a launch file").models
    }

    #[test]
    fn models_share_cores_when_threads_are_more_or_pins_are_the_same() {
        for (lines, usable, expected) in [
            (["", ""], 1, true),
            (["", ""], 64, true),
            (["threads = 4", "threads = 4"], 8, false),
            (["threads = 4", "threads = 5"], 8, true),
            (["threads = 4", ""], 8, true),
            (["cores = [0]", "cores = [1]"], 2, false),
            (["cores = [0, 1]", "cores = [1]"], 8, true),
            (["cores = [0]", "threads = 1"], 2, false),
            (["", "device = \"cuda:0\""], 2, false),
        ] {
            assert_eq!(share(&models(lines), usable), expected, "{lines:?} on {usable}");
        }
        assert!(!share(&models(["", ""])[..1], 2), "one model has nobody to share with");
    }
}
