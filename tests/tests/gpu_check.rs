//! `gpu-check`, the program for real hardware, on the software device: every part of it runs here. Owner: everyone.
//! Invariant: what it measures here means nothing, and it says so.
#![cfg(target_os = "linux")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tokenrouter_tests::clients::scratch;
use tokenrouter_tests::cuda_sim::CudaSim;
use tokenrouter_tests::gpu_check::SOFTWARE;

fn program(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.args(arguments).env_remove("OUT").envs(CudaSim::environment().unwrap());
    command.envs(variables.iter().copied()).output().unwrap()
}

fn folder(name: &str) -> PathBuf {
    let folder = scratch("gpu-check").join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Rows of a part: name, verdict, value.
fn rows(report: &Value, part: &str) -> Vec<(String, String, Option<f64>)> {
    let rows = report["rows"].as_array().unwrap().iter().filter(|row| row["part"] == part);
    let word = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
    rows.map(|row| (word(row, "name"), word(row, "verdict"), row["value"].as_f64())).collect()
}

#[test]
fn small_checks_hold() {
    let said = program(&["--small"], &[]);
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success(), "{out}\n{err}");
    assert!(out.starts_with(SOFTWARE), "{out}");
    for part in ["attention, seed", "matmul, seed", "Qwen3 BF16"] {
        let row = out.lines().find(|line| line.trim_start().starts_with(part));
        assert!(row.is_some_and(|row| row.ends_with(" ok")), "{part}: {out}");
    }
    assert!(out.contains(" 0 failed, 0 skipped"), "{out}");
}

#[test]
fn everything_that_measures_runs() {
    let out = folder("rehearsal");
    let said = program(&["--rehearse", "--out", text(&out)], &[]);
    let table = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success(), "{table}\n{}", String::from_utf8_lossy(&said.stderr));
    assert!(table.starts_with(SOFTWARE), "{table}");
    let report: Value = serde_json::from_slice(&std::fs::read(out.join("gpu-check.json")).unwrap()).unwrap();
    assert_eq!(report["software_device"], true);
    let steps = rows(&report, "steps, random weights");
    for name in ["tiny BF16, decode of 1", "tiny BF16, decode of 2, graphs off", "less tiny BF16, decode of 2 / of 1"] {
        let row = steps.iter().find(|row| row.0 == name).unwrap_or_else(|| panic!("no {name}: {steps:?}"));
        assert_eq!(row.1, "told", "nothing is judged here: {row:?}");
        assert!(row.2.is_some_and(|value| value > 0.0), "{row:?}");
    }
    assert!(steps.iter().any(|row| row.0 == "tiny BF16, step of 2 outside kernels" && row.2.is_some()), "{steps:?}");
    let pair = rows(&report, "two models on one device, bernoulli routing, p = 0.35");
    for name in ["N = 1, planned thresholds", "N = 2, predicted", "N = 2, graphs off", "N = 2, std_serving"] {
        let row = pair.iter().find(|row| row.0 == name).unwrap_or_else(|| panic!("no {name}: {pair:?}"));
        assert!(row.2.is_some_and(|value| value > 0.0), "{row:?}");
    }
    let quantised = rows(&report, "steps, quantised weights");
    assert!(quantised.iter().any(|row| row.0.starts_with("tiny Q8_0, decode of 1")), "{quantised:?}");
    std::fs::remove_dir_all(&out).unwrap();
}

#[test]
fn a_device_that_fails_fails_the_check() {
    let said = program(&["--small"], &[("CUDASIM_FAIL", "kernel:20:700")]);
    let out = String::from_utf8_lossy(&said.stdout);
    assert_eq!(said.status.code(), Some(1), "{out}");
    assert!(out.contains("FAILED"), "{out}");
}

/// Models that do not fit are skipped, and nothing fails for it.
#[test]
fn models_that_do_not_fit_are_skipped() {
    let said = program(&["--rehearse"], &[("CUDASIM_MEMORY", "400000000")]);
    let out = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success(), "{out}");
    for words in ["needs 0.5 GiB, 0.4 GiB are free", "needs both models"] {
        assert!(out.contains(words), "{words}: {out}");
    }
}

#[test]
fn without_a_device_there_is_one_line() {
    let said = program(&["--small"], &[("CUDASIM_DEVICES", "0")]);
    let err = String::from_utf8_lossy(&said.stderr);
    assert_eq!((said.status.code(), said.stdout.len(), err.lines().count()), (Some(2), 0, 1), "{err}");
}

/// On another machine: the script, the program and kernels compiled ahead, a driver, and nothing else.
#[test]
fn a_carried_program_needs_neither_compiler_nor_repository() {
    let place = folder("carried");
    let (release, cubins, driver) =
        (place.join("target/release"), place.join("target/gpu-check/cubins"), place.join("driver"));
    for folder in [&release, &cubins, &driver, &place.join("tests")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let said = program(&["--compile-ahead", "sm_90", text(&cubins)], &[("CUDASIM_DEVICES", "0")]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let count = std::fs::read_dir(&cubins).unwrap().count();
    assert_eq!(count, tokenrouter_kernels::cuda::sources().count());

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu-check.sh");
    std::fs::copy(script, place.join("tests/gpu-check.sh")).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_gpu-check"), release.join("gpu-check")).unwrap();
    let (_, libraries) =
        CudaSim::environment().unwrap().into_iter().find(|(name, _)| name == "LD_LIBRARY_PATH").unwrap();
    let libraries = PathBuf::from(libraries.split(':').next().unwrap());
    for library in ["libcuda.so.1", "libcuda.so"] {
        std::os::unix::fs::symlink(libraries.join(library), driver.join(library)).unwrap();
    }
    let mut command = Command::new("bash");
    command.arg(place.join("tests/gpu-check.sh")).args(["--rehearse", "--limit", "5"]).current_dir("/");
    let said = command.env_remove("OUT").env("LD_LIBRARY_PATH", &driver).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success(), "{out}\n{err}");
    for words in ["kernels that were compiled ahead are needed", "the project's own products are used", "skipped"] {
        assert!(out.contains(words), "{words}: {out}\n{err}");
    }
    assert_eq!(std::fs::read_dir(&cubins).unwrap().count(), count);
    std::fs::remove_dir_all(&place).unwrap();
}
