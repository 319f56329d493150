//! From CUDA source to machine code of a device, by NVRTC. Owner: a context asks once per source. Invariant: the sources
//! need no header but `common.cuh`, which is handed over in memory, so a driver and the NVRTC library are enough.

use super::cache;
use super::error::CudaError;
use cudarc::nvrtc::{result, sys};
use std::ffi::{CString, c_char};
use std::path::Path;

/// What every source includes.
pub(super) const COMMON: (&str, &str) = ("common.cuh", include_str!("common.cuh"));

/// A CUDA source file of this crate.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// File name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Names and texts of what it includes beside `common.cuh`.
    pub headers: &'static [(&'static str, &'static str)],
    /// Whether products and sums stay apart (`--fmad=false`), so that they round as on the host.
    pub exact: bool,
}

/// Machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// What the driver loads.
    pub image: Vec<u8>,
    /// What the compiler said, with `report` registers and spills of every kernel.
    pub log: String,
}

/// Compiler options of a source for an architecture.
pub(super) fn options(source: &Source, arch: &str) -> Vec<String> {
    let fmad = if source.exact { "--fmad=false" } else { "--fmad=true" };
    vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), fmad.into()]
}

/// Version of the compiler, `None` where there is none.
pub(super) fn version() -> Option<(i32, i32)> {
    // SAFETY: only loads the library by its name.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
    Some((major, minor))
}

/// From the cache in `folder` if it is there, compiled and put there otherwise; what is found has no log.
///
/// # Errors
/// [`CudaError::NoCompiler`] where it is not there and cannot be made, or [`CudaError::Compile`].
pub fn compile_cached(source: &Source, arch: &str, folder: Option<&Path>) -> Result<Compiled, CudaError> {
    let version = version();
    if let Some(image) = folder.and_then(|folder| cache::find(folder, (source, arch), version)) {
        return Ok(Compiled { image, log: String::new() });
    }
    let Some(version) = version else { return Err(CudaError::NoCompiler { arch: arch.to_owned() }) };
    let compiled = compile_for(source, arch, false)?;
    if let Some(folder) = folder {
        cache::store(folder, (source, arch), version, &compiled.image);
    }
    Ok(compiled)
}

/// Compiles for an architecture like `sm_90`; needs no device. With `report`, the log lists registers and spills.
///
/// # Errors
/// [`CudaError::NoCompiler`] or [`CudaError::Compile`].
pub fn compile_for(source: &Source, arch: &str, report: bool) -> Result<Compiled, CudaError> {
    if version().is_none() {
        return Err(CudaError::NoCompiler { arch: arch.to_owned() });
    }
    let failed = |log: String| CudaError::Compile { source_name: source.name, arch: arch.to_owned(), log };
    let mut options = options(source, arch);
    if report {
        options.push("--ptxas-options=-v".into());
    }
    let program = Program::new(source).map_err(|error| failed(error.to_string()))?;
    // SAFETY: the program lives until the end of this function.
    let done = unsafe { result::compile_program(program.raw, &options) };
    let log = program.log();
    done.map_err(|error| failed(if log.is_empty() { error.to_string() } else { log.clone() }))?;
    let image = program.image().map_err(|error| failed(error.to_string()))?;
    Ok(Compiled { image, log })
}

/// A program of NVRTC with the texts it points to.
struct Program {
    raw: sys::nvrtcProgram,
    /// Text, name, then names and texts of headers in turn.
    _texts: Vec<CString>,
}

impl Program {
    fn new(source: &Source) -> Result<Self, result::NvrtcError> {
        let headers = std::iter::once(&COMMON).chain(source.headers).flat_map(|&(name, text)| [name, text]);
        let texts = [source.text, source.name].into_iter().chain(headers);
        let texts: Vec<CString> = texts.map(|text| CString::new(text).unwrap_or_default()).collect();
        let pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let (names, bodies): (Vec<_>, Vec<_>) = pointers[2..].chunks_exact(2).map(|pair| (pair[0], pair[1])).unzip();
        let mut raw = std::ptr::null_mut();
        // SAFETY: all texts end in a zero and live as long as the program.
        unsafe {
            let (count, bodies, names) = (names.len() as i32, bodies.as_ptr(), names.as_ptr());
            sys::nvrtcCreateProgram(&mut raw, pointers[0], pointers[1], count, bodies, names)
        }
        .result()?;
        Ok(Program { raw, _texts: texts })
    }

    fn log(&self) -> String {
        // SAFETY: the program lives.
        let bytes = unsafe { result::get_program_log(self.raw) }.unwrap_or_default();
        let bytes: Vec<u8> = bytes.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    fn image(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut len = 0;
        // SAFETY: writes one number.
        unsafe { sys::nvrtcGetCUBINSize(self.raw, &mut len) }.result()?;
        let mut image = vec![0u8; len];
        // SAFETY: there is room for what the compiler said.
        unsafe { sys::nvrtcGetCUBIN(self.raw, image.as_mut_ptr().cast()) }.result()?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed here only; there is nothing to do about an error.
        let _done = unsafe { result::destroy_program(self.raw) };
    }
}
