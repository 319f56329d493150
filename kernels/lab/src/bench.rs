//! A device, its memory, launches and times, over `cust`. Owner: `main`. Invariant: a kernel is timed only after its result
//! was compared, each launch by itself between two events; the median counts.

use clap::Parser;
use cust::context::{Context, CurrentContext};
use cust::device::{Device, DeviceAttribute};
use cust::event::{Event, EventFlags};
use cust::memory::{AsyncCopyDestination, CopyDestination, DeviceBuffer, DeviceCopy};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::path::PathBuf;
use tokenrouter_kernels::cuda::{Source, compile_cached, compile_for, sources};

/// Bytes of each of the two arrays whose copy is the measure of bandwidth.
const COPY_BYTES: usize = 256 << 20;
/// What fresh memory holds: a value that was not written shows.
const POISON: u8 = 0xff;

/// Checks and times the CUDA kernels one by one.
#[derive(Clone, Debug, Parser)]
pub struct Options {
    /// Part of SOURCE/KERNEL; all kernels without it.
    #[arg(default_value = "")]
    pub filter: String,
    /// Lists kernels with their registers and stops; needs a compiler, but no device.
    #[arg(long, value_name = "ARCH", num_args = 0..=1, default_missing_value = "sm_90")]
    pub list: Option<String>,
    /// Device.
    #[arg(long, default_value_t = 0)]
    pub device: u32,
    /// Folder of compiled kernels.
    #[arg(long)]
    pub cache: Option<PathBuf>,
    /// Launches of which the median is told.
    #[arg(long, default_value_t = 50)]
    pub repeat: usize,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Tokens of a step.
    #[arg(long, default_value_t = 8)]
    pub rows: usize,
    /// Width of a model: a multiple of 64.
    #[arg(long, default_value_t = 4096)]
    pub width: usize,
    /// Outputs of a product.
    #[arg(long, default_value_t = 4096)]
    pub outputs: usize,
    /// Length of the context of a request.
    #[arg(long, default_value_t = 4096)]
    pub context: usize,
    /// Width of a row of logits.
    #[arg(long, default_value_t = 151_936)]
    pub vocab: usize,
    /// Bytes that are copied to measure bandwidth, in MiB.
    #[arg(long, default_value_t = COPY_BYTES >> 20)]
    pub copy: usize,
}

/// Where and how a kernel is launched.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Blocks.
    pub grid: (usize, usize),
    /// Threads of a block.
    pub block: u32,
    /// Arguments, each in a word of its own.
    pub args: Vec<u64>,
    /// Bytes read and written.
    pub bytes: usize,
}

impl Run {
    /// A launch of a grid, without arguments yet.
    pub fn new(grid: (usize, usize), block: u32) -> Run {
        Run { grid, block, ..Run::default() }
    }

    /// An array of the device.
    pub fn at<T: DeviceCopy>(mut self, array: &DeviceBuffer<T>) -> Run {
        self.args.push(array.as_device_ptr().as_raw());
        self
    }

    /// No array.
    pub fn null(mut self) -> Run {
        self.args.push(0);
        self
    }

    /// A size, or any number of 32 bits.
    pub fn size(mut self, value: usize) -> Run {
        self.args.push(u64::from(value as u32));
        self
    }

    /// A `u64`.
    pub fn long(mut self, value: u64) -> Run {
        self.args.push(value);
        self
    }

    /// A `float`.
    pub fn float(mut self, value: f32) -> Run {
        self.args.push(u64::from(value.to_bits()));
        self
    }

    /// What a launch reads and writes.
    pub fn moves(mut self, bytes: usize) -> Run {
        self.bytes = bytes;
        self
    }
}

/// The text of an error of `cust`.
fn text(what: &str) -> impl Fn(cust::error::CudaError) -> String {
    move |error| format!("{what}: {error:?}")
}

/// Xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// In -1..1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `n` of them.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// A device and what was found on it.
pub struct Lab {
    /// What is wanted.
    pub options: Options,
    /// Inputs.
    pub random: Random,
    stream: Stream,
    modules: BTreeMap<&'static str, Module>,
    /// Kernels that no case has launched yet, as SOURCE/KERNEL.
    missing: BTreeSet<String>,
    arch: String,
    /// Bytes a second of a copy, read and written.
    copies: f64,
    /// The kernel of the case.
    kernel: (&'static str, String),
    /// What its input is, where a kernel has several cases.
    pub note: String,
    milliseconds: f64,
    bytes: usize,
    wrong: usize,
    // Last: everything else goes before it.
    _context: Context,
}

/// SOURCE/KERNEL and registers of everything in a source.
fn kernels(source: &Source, arch: &str) -> Result<Vec<(String, String)>, String> {
    let log = compile_for(source, arch, true).map_err(|error| error.to_string())?.log;
    let mut found: Vec<(String, String)> = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            found.push((format!("{}/{}", source.name, name.split('\'').next().unwrap_or_default()), String::new()));
        } else if let (Some((_, needs)), Some(last)) = (line.split_once(": Used "), found.last_mut()) {
            last.1 = needs.to_owned();
        }
    }
    Ok(found)
}

/// Prints all kernels and what they take.
pub fn list(arch: &str) -> Result<(), String> {
    for source in sources() {
        kernels(source, arch)?.iter().for_each(|(name, needs)| println!("{name}: {needs}"));
    }
    Ok(())
}

impl Lab {
    /// Opens a device and measures its copies.
    pub fn open(options: Options) -> Result<Lab, String> {
        cust::init(cust::CudaFlags::empty()).map_err(text("cuInit"))?;
        let device = Device::get_device(options.device).map_err(text("no such device"))?;
        let context = Context::new(device).map_err(text("a context"))?;
        let attribute = |attribute| device.get_attribute(attribute).map_err(text("an attribute"));
        let major = attribute(DeviceAttribute::ComputeCapabilityMajor)?;
        let minor = attribute(DeviceAttribute::ComputeCapabilityMinor)?;
        let stream = Stream::new(StreamFlags::DEFAULT, None).map_err(text("a stream"))?;
        let mut lab = Lab {
            random: Random(options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            options,
            stream,
            modules: BTreeMap::new(),
            missing: BTreeSet::new(),
            arch: format!("sm_{major}{minor}"),
            copies: 0.0,
            kernel: ("", String::new()),
            note: String::new(),
            milliseconds: 0.0,
            bytes: 0,
            wrong: 0,
            _context: context,
        };
        lab.copies = lab.measure_copies()?;
        println!("{} ({}), copies {:.0} GB/s", device.name().map_err(text("a name"))?, lab.arch, lab.copies / 1e9);
        println!("{:50} {:>10} {:>9} {:>6} {:>9}", "kernel", "us", "GB/s", "share", "error");
        // Every kernel is to be launched by somebody; without a compiler nobody knows which there are.
        for source in sources() {
            let names = kernels(source, &lab.arch).unwrap_or_default();
            lab.missing
                .extend(names.into_iter().map(|(name, _)| name).filter(|name| name.contains(&lab.options.filter)));
        }
        Ok(lab)
    }

    fn measure_copies(&mut self) -> Result<f64, String> {
        let bytes = self.options.copy << 20;
        let (from, mut to) = (self.empty::<u8>(bytes)?, self.empty::<u8>(bytes)?);
        // SAFETY: both live until the stream has been waited for, which `median` does.
        let copy = |stream: &Stream| unsafe { to.async_copy_from(&from, stream) };
        let seconds = self.median(copy)? / 1e3;
        Ok(2.0 * bytes as f64 / seconds)
    }

    /// Milliseconds of some work on the stream.
    fn median(&self, mut work: impl FnMut(&Stream) -> cust::error::CudaResult<()>) -> Result<f64, String> {
        let event = || Event::new(EventFlags::DEFAULT).map_err(text("an event"));
        let (start, end) = (event()?, event()?);
        let mut times = Vec::new();
        for _ in 0..self.options.repeat.max(1) {
            start.record(&self.stream).map_err(text("an event"))?;
            work(&self.stream).map_err(text("a launch"))?;
            end.record(&self.stream).map_err(text("an event"))?;
            end.synchronize().map_err(text(&self.kernel.1))?;
            times.push(f64::from(end.elapsed_time_f32(&start).map_err(text("an event"))?));
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// Copies values to the device.
    pub fn put<T: DeviceCopy>(&self, values: &[T]) -> Result<DeviceBuffer<T>, String> {
        DeviceBuffer::from_slice(values).map_err(text("memory"))
    }

    /// Memory of the device, full of ones: no number as floats.
    pub fn empty<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>, String> {
        // SAFETY: written at once.
        let array = unsafe { DeviceBuffer::<T>::uninitialized(len) }.map_err(text("memory"))?;
        let (start, bytes) = (array.as_device_ptr().as_raw(), len * size_of::<T>());
        // SAFETY: the bytes of the array; the types of kernels take any bits.
        let set = unsafe { cust::sys::cuMemsetD8Async(start, POISON, bytes, self.stream.as_inner()) };
        if bytes > 0 && set != cust::sys::cudaError_enum::CUDA_SUCCESS {
            return Err(format!("cuMemsetD8Async: {set:?}"));
        }
        Ok(array)
    }

    /// Copies values to the host.
    pub fn get<T: DeviceCopy + Default + Clone>(&self, array: &DeviceBuffer<T>) -> Result<Vec<T>, String> {
        CurrentContext::synchronize().map_err(text(&self.kernel.1))?;
        let mut values = vec![T::default(); array.len()];
        array.copy_to(&mut values[..]).map_err(text(&self.kernel.1))?;
        Ok(values)
    }

    /// Launches the kernel of a name of the source of the case once.
    pub fn launch(&self, name: &str, run: &Run) -> Result<(), String> {
        self.give(name, run, &self.stream)
    }

    fn give(&self, name: &str, run: &Run, stream: &Stream) -> Result<(), String> {
        let module = self.modules.get(self.kernel.0).ok_or("no case")?;
        let function = module.get_function(name).map_err(text(name))?;
        let arguments: Vec<*mut c_void> =
            run.args.iter().map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect();
        let grid = (run.grid.0 as u32, run.grid.1 as u32);
        // SAFETY: the arguments are those that the source of the kernel names, in arrays that the case keeps until it has
        // waited; the driver copies the words.
        unsafe { stream.launch(&function, grid, run.block, 0, &arguments) }.map_err(text(name))
    }

    /// Launches the kernel of the case, and returns what is in `result` then.
    pub fn first<T: DeviceCopy + Default + Clone>(
        &self,
        run: &Run,
        result: &DeviceBuffer<T>,
    ) -> Result<Vec<T>, String> {
        self.launch(&self.kernel.1, run)?;
        self.get(result)
    }

    /// Times the kernel of the case.
    pub fn time(&mut self, run: &Run) -> Result<(), String> {
        let (name, mut failed) = (self.kernel.1.clone(), None);
        let milliseconds = self.median(|stream| {
            failed = self.give(&name, run, stream).err().or(failed.take());
            Ok(())
        })?;
        (self.milliseconds, self.bytes) = (milliseconds, run.bytes);
        failed.map_or(Ok(()), Err)
    }

    /// A kernel, if it is wanted: `work` launches, compares and times it, and returns the error and what it may be.
    pub fn case(
        &mut self,
        (source, kernel): (&'static Source, &str),
        work: impl FnOnce(&mut Lab) -> Result<(f64, f64), String>,
    ) -> Result<(), String> {
        let name = format!("{}/{kernel}", source.name);
        if !name.contains(&self.options.filter) {
            return Ok(());
        }
        self.missing.remove(&name);
        if !self.modules.contains_key(source.name) {
            let compiled = compile_cached(source, &self.arch, self.options.cache.as_deref());
            let image = compiled.map_err(|error| error.to_string())?.image;
            let module = Module::from_cubin(&image, &[]).map_err(text(source.name))?;
            self.modules.insert(source.name, module);
        }
        self.kernel = (source.name, kernel.to_owned());
        self.note.clear();
        let (error, tolerance) = work(self)?;
        let rate = self.bytes as f64 / self.milliseconds * 1e3;
        let (us, share) = (self.milliseconds * 1e3, 100.0 * rate / self.copies);
        let good = error <= tolerance;
        let verdict = if good { "" } else { "  WRONG" };
        let name = format!("{name} {}", self.note);
        println!("{name:50} {us:10.1} {:9.1} {share:5.0}% {error:9.1e}{verdict}", rate / 1e9);
        self.wrong += usize::from(!good);
        Ok(())
    }

    /// How many kernels were wrong; it is an error if there are some that nobody launched.
    pub fn finish(self) -> Result<usize, String> {
        if self.missing.is_empty() {
            return Ok(self.wrong);
        }
        let missing: Vec<String> = self.missing.into_iter().collect();
        Err(format!("kernels without a case: {}", missing.join(", ")))
    }
}

/// The largest difference relative to `scale`; what is no number is infinitely far off.
pub fn worst(found: impl IntoIterator<Item = f32>, expected: impl IntoIterator<Item = f64>, scale: f64) -> f64 {
    let errors = found.into_iter().zip(expected).map(|(found, expected)| (f64::from(found) - expected).abs() / scale);
    errors.fold(0.0, |worst, error| if error.is_nan() { f64::INFINITY } else { error.max(worst) })
}
