//! Every CUDA source through NVIDIA's own compiler, without a GPU: NVRTC from a wheel of the Python package index makes
//! machine code for several architectures, and says what each kernel takes.
//!
//! Owner: `kernels`. Invariant: every kernel is in `tests/fixtures/cuda/registers.tsv` and takes no more than it says there;
//! `UPDATE_REGISTERS=1` writes that table. This process never loads the software device, whose compiler has the same name.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokenrouter_kernels::cuda::{CudaError, Source, compile_cached, compile_for, sources};
use tokenrouter_tests::clients::{Venv, run};

/// H100 and H200.
const MAIN: &str = "sm_90";
/// Every source is compiled for these: A100 and H100.
const WHOLE: [&str; 2] = ["sm_80", MAIN];
/// L40S, B200, RTX 50: as many sources as time allows.
const OTHERS: [&str; 3] = ["sm_89", "sm_100", "sm_120"];
/// Heads of most models stand for those of all sizes.
const ATTENTION: [&str; 4] =
    ["attention_bf16_64.cu", "attention_f16_64.cu", "attention_bf16_128.cu", "attention_f16_128.cu"];
/// Names a folder of compiled kernels for a process of this test that has no compiler.
const KEPT: &str = "NVRTC_TEST_KEPT";

/// Loads NVRTC; afterwards cudarc finds it by its name.
fn load() {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        let venv = Venv::of("requirements-nvrtc.txt");
        let find = "import nvidia.cuda_nvrtc as package; print(list(package.__path__)[0], end='')";
        let found = run(venv.python().args(["-c", find]), "the wheel of NVRTC has another layout than this test knows");
        let path = PathBuf::from(String::from_utf8_lossy(&found.stdout).into_owned()).join("lib/libnvrtc.so.12");
        let name = CString::new(path.to_string_lossy().into_owned()).expect("a path has no zero");
        // SAFETY: NVIDIA's library, whose initialisers only set up itself; it is never closed.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{}", loader_error());
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        let asked = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result();
        // Another one would count registers in its own way.
        assert_eq!((asked, major, minor), (Ok(()), 12, 9), "an NVRTC without a number lies in the path of the loader");
    });
}

fn loader_error() -> String {
    // SAFETY: the text of the loader lives until its next call in this thread.
    unsafe { CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned() }
}

/// What the assembler said about a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Needs {
    /// Of a thread.
    registers: u32,
    /// Bytes of a thread that are kept elsewhere for want of registers: stores and loads in the code.
    spilled: u32,
    /// Bytes of a thread.
    stack: u32,
    /// Bytes of a block, without what a launch asks for.
    shared: u32,
    /// Bytes, without arguments.
    constant: u32,
}

impl Needs {
    const NAMES: [&str; 5] = ["registers", "spilled", "stack", "shared", "constant"];

    fn values(self) -> [u32; 5] {
        [self.registers, self.spilled, self.stack, self.shared, self.constant]
    }
}

/// Source, kernel, architecture.
type Key = (String, String, String);

/// The number in front of `unit` in a line such as `Used 45 registers, used 0 barriers, 8192 bytes smem`.
fn before(line: &str, unit: &str) -> u32 {
    let words = line.split(unit).next().filter(|before| before.len() < line.len()).unwrap_or_default();
    let number = words.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    number.parse().unwrap_or(0)
}

/// Kernels of a log of `--ptxas-options=-v`.
fn kernels(log: &str) -> Vec<(String, Needs)> {
    let mut found: Vec<(String, Needs)> = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            found.push((name.split('\'').next().unwrap_or_default().to_owned(), Needs::default()));
        }
        let Some((_, needs)) = found.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            needs.stack = before(line, " bytes stack frame");
            needs.spilled = before(line, " bytes spill stores") + before(line, " bytes spill loads");
        } else if line.contains(": Used ") {
            needs.registers = before(line, " registers");
            needs.shared = before(line, " bytes smem");
            // Bank 0 has the arguments; 2 and 3 what the compiler and the source put there.
            needs.constant = before(line, " bytes cmem[2]") + before(line, " bytes cmem[3]");
        }
    }
    found
}

/// Compiles all of them, two at a time.
fn compile(work: &[(&Source, &str)]) -> BTreeMap<Key, Needs> {
    let next = AtomicUsize::new(0);
    let one = || {
        let mut found = Vec::new();
        while let Some((source, arch)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let compiled = compile_for(source, arch, true).unwrap_or_else(|error| panic!("{error}"));
            assert!(compiled.image.starts_with(b"\x7fELF"), "{} for {arch} is no machine code", source.name);
            let kernels = kernels(&compiled.log);
            assert!(!kernels.is_empty(), "{} for {arch} has no kernel: {}", source.name, compiled.log);
            let key = |kernel| (source.name.to_owned(), kernel, (*arch).to_owned());
            found.extend(kernels.into_iter().map(|(kernel, needs)| (key(kernel), needs)));
        }
        found
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(one), scope.spawn(one)];
        threads.into_iter().flat_map(|thread| thread.join().expect("the sources compile")).collect()
    })
}

fn table_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/cuda/registers.tsv")
}

fn write_table(found: &BTreeMap<Key, Needs>) {
    let mut text = format!("source\tkernel\tarchitecture\t{}\n", Needs::NAMES.join("\t"));
    for ((source, kernel, arch), needs) in found {
        let values = needs.values().map(|value| value.to_string()).join("\t");
        text += &format!("{source}\t{kernel}\t{arch}\t{values}\n");
    }
    fs::write(table_file(), text).expect("the folder is there");
}

fn read_table() -> BTreeMap<Key, Needs> {
    let text = fs::read_to_string(table_file()).expect("the table is there");
    let rows = text.lines().skip(1).map(|line| {
        let cells: Vec<&str> = line.split('\t').collect();
        let [source, kernel, arch, values @ ..] = &cells[..] else { panic!("{line:?}") };
        let values: Vec<u32> = values.iter().map(|value| value.parse().expect("a number")).collect();
        let [registers, spilled, stack, shared, constant] = values[..] else { panic!("{line:?}") };
        let needs = Needs { registers, spilled, stack, shared, constant };
        (((*source).to_owned(), (*kernel).to_owned(), (*arch).to_owned()), needs)
    });
    rows.collect()
}

/// What is worse than the table says, and where the table is about something else.
fn worse(found: &BTreeMap<Key, Needs>, table: &BTreeMap<Key, Needs>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (key, needs) in found {
        let Some(known) = table.get(key) else {
            wrong.push(format!("{key:?} is not in the table"));
            continue;
        };
        for (name, (now, then)) in Needs::NAMES.iter().zip(needs.values().into_iter().zip(known.values())) {
            if now > then {
                wrong.push(format!("{key:?}: {name} {now} instead of {then}"));
            }
        }
    }
    wrong
        .extend(table.keys().filter(|key| !found.contains_key(key)).map(|key| format!("{key:?} is in the table only")));
    wrong
}

#[test]
fn every_kernel_compiles_and_takes_no_more_than_before() {
    load();
    let others = |source: &&Source| !source.name.starts_with("attention_") || ATTENTION.contains(&source.name);
    let mut work: Vec<(&Source, &str)> =
        WHOLE.iter().flat_map(|arch| sources().map(move |source| (source, *arch))).collect();
    work.extend(OTHERS.iter().flat_map(|arch| sources().filter(others).map(move |source| (source, *arch))));
    // The longest first, so that both threads end together.
    work.sort_by_key(|(source, _)| source.name != "matmul.cu");
    let found = compile(&work);
    if std::env::var_os("UPDATE_REGISTERS").is_some() {
        write_table(&found);
    }
    let wrong = worse(&found, &read_table());
    assert!(
        wrong.is_empty(),
        "UPDATE_REGISTERS=1 writes the table if that is as it should be:\n  {}",
        wrong.join("\n  ")
    );
}

#[test]
fn what_is_worse_than_the_table_is_told() {
    let log = "ptxas info    : Compiling entry function 'f' for 'sm_80'\n\
               ptxas info    : Function properties for f\n\
               ptxas         .     32 bytes stack frame, 88 bytes spill stores, 112 bytes spill loads\n\
               ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 448 bytes cmem[0], 8 bytes cmem[2]";
    let needs = Needs { registers: 40, spilled: 200, stack: 32, shared: 512, constant: 8 };
    assert_eq!(kernels(log), [("f".to_owned(), needs)]);
    let of = |kernel: &str, needs| (("a.cu".to_owned(), kernel.to_owned(), "sm_80".to_owned()), needs);
    let table = BTreeMap::from([of("f", needs), of("g", needs)]);
    assert!(worse(&table, &table).is_empty());
    let fewer = Needs { registers: 39, ..needs };
    assert!(worse(&BTreeMap::from([of("f", fewer), of("g", needs)]), &table).is_empty());
    let more = Needs { registers: 41, spilled: 204, ..needs };
    let told = worse(&BTreeMap::from([of("f", more), of("h", needs)]), &table);
    assert_eq!(told.len(), 4, "{told:?}");
}

/// A source that is in no list is compiled on users' machines only.
#[test]
fn every_source_file_is_listed() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/src");
    let mut files = Vec::new();
    for folder in fs::read_dir(kernels).expect("the folder is there").map(|entry| entry.expect("an entry").path()) {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        files.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cu"));
    assert!(files.len() >= 8, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).expect("it is there");
        let listed =
            sources().any(|source| source.text == text || source.headers.iter().any(|header| header.1 == text));
        assert!(listed, "{} is not in tokenrouter_kernels::cuda::sources()", file.display());
    }
}

/// The same test in two processes: one makes and keeps code, the other has no compiler.
#[test]
fn kept_code_is_found_without_a_compiler() {
    let source = sources().next().expect("there are sources");
    if let Some(folder) = std::env::var_os(KEPT) {
        let folder = Path::new(&folder);
        let found = compile_cached(source, MAIN, Some(folder)).expect("it was kept");
        fs::write(folder.join("found"), found.image).expect("the folder is ours");
        let other = compile_cached(source, OTHERS[0], Some(folder)).map(|compiled| compiled.log);
        // Where CUDA is installed there is a compiler after all.
        let none = CudaError::NoCompiler { arch: OTHERS[0].to_owned() };
        assert!(other.is_ok() || other == Err(none.clone()), "{other:?}");
        return;
    }
    load();
    let folder = std::env::temp_dir().join(format!("tokenrouter-nvrtc-{}", std::process::id()));
    let _left_over = fs::remove_dir_all(&folder);
    let made = compile_cached(source, MAIN, Some(&folder)).expect("it compiles");
    assert_eq!(compile_cached(source, MAIN, Some(&folder)).expect("it is kept").image, made.image);
    assert_eq!(fs::read_dir(&folder).expect("the folder is there").count(), 1);
    let test = std::env::current_exe().expect("this test runs");
    let mut child = Command::new(test);
    child.args(["--exact", "kept_code_is_found_without_a_compiler"]).env(KEPT, &folder);
    run(&mut child, "see what it says");
    let found = fs::read(folder.join("found")).expect("the other process wrote it");
    assert!(found == made.image, "other code was found: {} instead of {} bytes", found.len(), made.image.len());
    fs::remove_dir_all(&folder).expect("the folder is ours");
}
