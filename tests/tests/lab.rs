//! The workbench of the CUDA kernels (`kernels/lab`), built against the software device and run on it: every kernel once,
//! launched by another binding with arguments of its own. Owner: `kernels/lab`. Invariant: no kernel is without a case there.
#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use tokenrouter_tests::clients::{run, scratch};
use tokenrouter_tests::cuda_sim::CudaSim;

/// What `cust` calls and the software device has no need of.
const MISSING: &str = r#"
extern "C" int cuModuleLoadData(void**, const void*);
extern "C" int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void*) {
    return cuModuleLoadData(module, image);
}
"#;

/// The software device with what it has not, as a library that the workbench is linked to.
fn driver(device: &Path) -> PathBuf {
    let folder = scratch("lab");
    let (source, library) = (folder.join("missing.cpp"), folder.join("libmissing.so"));
    std::fs::write(&source, MISSING).expect("the target folder can be written");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut compile = Command::new(compiler);
    compile.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg(device.join("libcuda.so.1"));
    run(&mut compile, "a C++ compiler must be there");
    library
}

/// Builds the workbench. The build script of `cust` would look for CUDA, and does not where it documents.
fn build(device: &Path) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/lab");
    let target = scratch("lab").join("../..");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["rustc", "--locked", "--quiet"]).current_dir(folder).env("DOCS_RS", "1");
    cargo.arg("--target-dir").arg(&target).arg("--");
    for library in [driver(device), device.join("libcuda.so.1")] {
        let folder = library.parent().expect("a file").display();
        cargo.args(["-C", &format!("link-arg={}", library.display()), "-C", &format!("link-arg=-Wl,-rpath,{folder}")]);
    }
    run(&mut cargo, "the workbench must compile; cust comes from crates.io");
    target.join("debug/tokenrouter-lab")
}

/// SOURCE/KERNEL of all kernels, as NVIDIA's compiler sees them (`tests/tests/nvrtc.rs`).
fn kernels() -> BTreeSet<String> {
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/cuda/registers.tsv");
    let text = std::fs::read_to_string(table).expect("the table is there");
    let rows = text.lines().skip(1).map(|line| line.splitn(3, '\t').take(2).collect::<Vec<_>>().join("/"));
    rows.collect()
}

#[test]
fn every_kernel_does_what_it_says_when_others_launch_it() {
    let environment = CudaSim::environment().unwrap_or_else(|error| panic!("{error}"));
    let (_, paths) = environment.iter().find(|(name, _)| name == "LD_LIBRARY_PATH").expect("the device lies somewhere");
    let device = std::env::split_paths(paths).next().expect("the device comes first");
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_secs());
    let sizes =
        format!("--rows 3 --width 192 --outputs 53 --context 100 --vocab 2100 --copy 1 --repeat 1 --seed {seed}");
    let mut lab = Command::new(build(&device));
    lab.args(sizes.split(' ')).envs(environment);
    let said = run(&mut lab, "see which kernel is wrong; the seed repeats it").stdout;
    let said = String::from_utf8_lossy(&said);
    let launched: BTreeSet<String> = said
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|word| word.contains('/'))
        .map(str::to_owned)
        .collect();
    let missing: Vec<_> = kernels().difference(&launched).cloned().collect();
    assert!(missing.is_empty(), "kernels without a case in kernels/lab: {missing:?}\n{said}");
}
