//! The software CUDA device (`tests/cuda-sim`): built once, loaded before anything looks for a driver, steered by tests.
//! Owner: tests of the CUDA backend. Invariant: a process loads it once and keeps it; [`CudaSim::alone`] hands it to one
//! test at a time, with everything as it was at the start.

use crate::assets;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Libraries in the order in which they need each other, without and with their numbers: programs look for either.
const LIBRARIES: [&str; 6] =
    ["libcuda.so.1", "libnvrtc.so.12", "libcublasLt.so.12", "libcuda.so", "libnvrtc.so", "libcublasLt.so"];

type Text = *const c_char;

/// The functions of `cudasim.h`.
#[derive(Debug)]
pub struct CudaSim {
    fail: unsafe extern "C" fn(Text, c_uint, c_int),
    calls: unsafe extern "C" fn(Text) -> c_ulonglong,
    reset_counters: unsafe extern "C" fn(),
    lose: unsafe extern "C" fn(c_int, c_int),
    live: unsafe extern "C" fn(Text) -> c_ulonglong,
    last_report: unsafe extern "C" fn(*mut c_char, usize) -> usize,
    schedule: unsafe extern "C" fn(c_uint),
    streams: unsafe extern "C" fn(c_uint),
    poison: unsafe extern "C" fn(c_uint),
    seconds: unsafe extern "C" fn(c_uint),
    devices: unsafe extern "C" fn(c_int),
    memory: unsafe extern "C" fn(c_ulonglong),
    driver: unsafe extern "C" fn(c_int),
    capability: unsafe extern "C" fn(c_int, c_int),
}

/// When the work of streams is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// As late as possible: only what is waited for.
    Late = 0,
    /// In the call that gives it.
    Now = 1,
    /// Late, but all other streams before the one that is waited for.
    OthersFirst = 2,
}

/// The order of threads between barriers, and of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// From the first to the last.
    Forward,
    /// From the last to the first.
    Reverse,
    /// Drawn from a seed.
    Random(u16),
}

/// The device for one test at a time.
#[derive(Debug)]
pub struct Alone {
    sim: &'static CudaSim,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Alone {
    type Target = CudaSim;
    fn deref(&self) -> &CudaSim {
        self.sim
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.sim.reset();
    }
}

impl CudaSim {
    /// Builds and loads the device; afterwards cudarc finds it as driver, compiler and matrix library of this process.
    ///
    /// # Errors
    /// What the C++ compiler or the loader said.
    pub fn load() -> Result<&'static CudaSim, String> {
        static LOADED: OnceLock<Result<CudaSim, String>> = OnceLock::new();
        LOADED.get_or_init(|| open(&build()?)).as_ref().map_err(Clone::clone)
    }

    /// As [`CudaSim::load`], and keeps other tests of this process that ask the same waiting until it is dropped.
    ///
    /// # Errors
    /// As [`CudaSim::load`].
    pub fn alone() -> Result<Alone, String> {
        static TURN: Mutex<()> = Mutex::new(());
        let sim = Self::load()?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        sim.reset();
        Ok(Alone { sim, _turn: turn })
    }

    /// Variables with which another program finds the device. `CUDASIM_DEVICES`, `CUDASIM_MEMORY`, `CUDASIM_DRIVER`,
    /// `CUDASIM_CAPABILITY` (like 90), `CUDASIM_SCHEDULE`, `CUDASIM_STREAMS`, `CUDASIM_POISON`, `CUDASIM_SECONDS`, and `CUDASIM_FAIL`
    /// (`call:nth:code,...`) set it up; with `CUDASIM_TRACE` it writes its reports to standard error.
    ///
    /// # Errors
    /// As [`CudaSim::load`].
    pub fn environment() -> Result<Vec<(String, String)>, String> {
        let mut folders = vec![build()?];
        if let Some(before) = std::env::var_os("LD_LIBRARY_PATH") {
            folders.extend(std::env::split_paths(&before));
        }
        let joined = std::env::join_paths(folders).map_err(|error| format!("LD_LIBRARY_PATH: {error}"))?;
        Ok(vec![("LD_LIBRARY_PATH".into(), joined.to_string_lossy().into_owned())])
    }

    /// Everything as after the start: one device of compute capability 9.0 with 1 GiB, a driver for CUDA 12.8, forward,
    /// late, fresh memory full of NaN, nothing counted, nothing to fail.
    pub fn reset(&self) {
        self.set_schedule(Schedule::Forward);
        self.set_streams(Streams::Late);
        self.set_poison(0xff);
        self.set_seconds(60);
        self.set_devices(1);
        self.set_memory(1 << 30);
        self.set_driver(12080);
        self.set_capability(9, 0);
        // SAFETY: takes nothing.
        unsafe { (self.reset_counters)() }
    }

    /// The `nth` call of that name from now on (1 = the next) returns `code`. Names are the driver's without `_v2`;
    /// "kernel" stands for the running of a kernel. A code that no context survives makes the current one lost.
    pub fn fail(&self, call: &str, nth: u32, code: i32) {
        // SAFETY: the text lives during the call.
        unsafe { (self.fail)(text(call).as_ptr(), nth, code) }
    }

    /// Calls of that name since the counters were reset; also "kernel" and "pageable copy".
    pub fn calls(&self, call: &str) -> u64 {
        // SAFETY: the text lives during the call.
        unsafe { (self.calls)(text(call).as_ptr()) }
    }

    /// Counters to zero; failures that were asked for and have not happened are forgotten.
    pub fn reset_counters(&self) {
        // SAFETY: takes nothing.
        unsafe { (self.reset_counters)() }
    }

    /// Everything in the context of a device returns `code` (700 or 999, say) until it is reset.
    pub fn lose(&self, device: i32, code: i32) {
        // SAFETY: takes numbers.
        unsafe { (self.lose)(device, code) }
    }

    /// How many of "memory" (allocations), "pinned", "stream", "event", "module", "graph", "context" exist.
    pub fn live(&self, what: &str) -> u64 {
        // SAFETY: the text lives during the call.
        unsafe { (self.live)(text(what).as_ptr()) }
    }

    /// What the last failure was: kernel, block, thread, line, address.
    pub fn last_report(&self) -> String {
        let mut bytes = vec![0u8; 1024];
        // SAFETY: writes at most so many bytes, with a zero at the end.
        unsafe { (self.last_report)(bytes.as_mut_ptr().cast(), bytes.len()) };
        CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Order of threads and blocks from here on.
    pub fn set_schedule(&self, schedule: Schedule) {
        let number = match schedule {
            Schedule::Forward => 0,
            Schedule::Reverse => 1,
            Schedule::Random(seed) => 2 + u32::from(seed),
        };
        // SAFETY: takes a number.
        unsafe { (self.schedule)(number) }
    }

    /// When streams work from here on.
    pub fn set_streams(&self, streams: Streams) {
        // SAFETY: takes a number.
        unsafe { (self.streams)(streams as c_uint) }
    }

    /// Byte that fresh memory is filled with.
    pub fn set_poison(&self, byte: u8) {
        // SAFETY: takes a number.
        unsafe { (self.poison)(c_uint::from(byte)) }
    }

    /// A kernel that runs for so many seconds is broken off as an endless loop.
    pub fn set_seconds(&self, seconds: u32) {
        // SAFETY: takes a number.
        unsafe { (self.seconds)(seconds) }
    }

    /// Number of devices.
    pub fn set_devices(&self, count: u16) {
        // SAFETY: takes a number.
        unsafe { (self.devices)(c_int::from(count)) }
    }

    /// Bytes of each device.
    pub fn set_memory(&self, bytes: u64) {
        // SAFETY: takes a number.
        unsafe { (self.memory)(bytes) }
    }

    /// Version of the driver: 1000 * major + 10 * minor.
    pub fn set_driver(&self, version: i32) {
        // SAFETY: takes a number.
        unsafe { (self.driver)(version) }
    }

    /// Compute capability of the devices.
    pub fn set_capability(&self, major: u8, minor: u8) {
        // SAFETY: takes numbers.
        unsafe { (self.capability)(c_int::from(major), c_int::from(minor)) }
    }
}

fn text(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// Folder with the libraries, by a hash of their sources; one process builds, others wait.
fn build() -> Result<PathBuf, String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda-sim");
    let folder = assets::target_folder()?.join("cuda-sim").join(hash_of(&sources)?);
    let complete = folder.join("complete");
    let at = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    if complete.is_file() {
        return Ok(folder);
    }
    fs::create_dir_all(&folder).map_err(|error| at(&folder, error))?;
    let lock = File::create(folder.join("lock")).map_err(|error| at(&folder, error))?;
    lock.lock().map_err(|error| at(&folder, error))?;
    if complete.is_file() {
        return Ok(folder);
    }
    let script = sources.join("build.sh");
    let built = Command::new("sh").arg(&script).arg(&folder).output().map_err(|error| at(&script, error))?;
    if !built.status.success() {
        return Err(format!("the software device does not build: {}", String::from_utf8_lossy(&built.stderr)));
    }
    File::create(&complete).map_err(|error| at(&complete, error))?;
    Ok(folder)
}

fn hash_of(sources: &Path) -> Result<String, String> {
    let at = |error: std::io::Error| format!("{}: {error}", sources.display());
    let entries = fs::read_dir(sources).map_err(at)?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>().map_err(at)?;
    files.sort();
    let mut hasher = DefaultHasher::new();
    std::env::var_os("CXX").hash(&mut hasher);
    for file in files {
        file.file_name().hash(&mut hasher);
        fs::read(&file).map_err(at)?.hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Loads all libraries for the rest of the process.
fn open(folder: &Path) -> Result<CudaSim, String> {
    let mut handles = [std::ptr::null_mut(); LIBRARIES.len()];
    for (handle, name) in handles.iter_mut().zip(LIBRARIES) {
        let path = text(&folder.join(name).to_string_lossy());
        // SAFETY: our own libraries, whose initialisers only set up C++ statics; they are never closed.
        *handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            return Err(format!("{name}: {}", loader_error()));
        }
    }
    macro_rules! functions {
        ($($field:ident),*) => {
            // SAFETY: `cudasim.h`, of the same commit as this file, declares them with the types of the fields.
            unsafe { CudaSim { $($field: function(handles[0], concat!("cudasim_", stringify!($field)))?),* } }
        };
    }
    Ok(functions!(
        fail,
        calls,
        reset_counters,
        lose,
        live,
        last_report,
        schedule,
        streams,
        poison,
        seconds,
        devices,
        memory,
        driver,
        capability
    ))
}

/// A function of a library.
///
/// # Safety
/// `F` must be the type of a pointer to that function, and the library must stay open as long as it is used.
unsafe fn function<F: Copy>(library: *mut c_void, name: &str) -> Result<F, String> {
    // SAFETY: the library is open.
    let symbol = unsafe { libc::dlsym(library, text(name).as_ptr()) };
    if symbol.is_null() {
        return Err(format!("{name}: {}", loader_error()));
    }
    assert_eq!(size_of::<F>(), size_of_val(&symbol));
    // SAFETY: pointers to functions and to data have one size here, and the caller promises the type.
    Ok(unsafe { std::mem::transmute_copy(&symbol) })
}

fn loader_error() -> String {
    // SAFETY: the text of the loader lives until its next call in this thread.
    unsafe {
        let error = libc::dlerror();
        if error.is_null() { "unknown".into() } else { CStr::from_ptr(error).to_string_lossy().into_owned() }
    }
}
