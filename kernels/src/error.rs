//! What can go wrong before a kernel runs: sizes that a file or a launch file got wrong.
//!
//! Owner: the constructors ([`crate::matmul::Matrix::new`], [`crate::Pool::new`], ...). Once something is constructed,
//! wrong buffer sizes are bugs of the caller and panic (each operation documents it).

/// An input that cannot be used; the text names the remedy where there is one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A row length that the block size of the format does not divide.
    #[error("{format} rows need a multiple of {block} values, found {cols}; convert the tensor to another type")]
    RowLength {
        /// GGUF name of the format.
        format: &'static str,
        /// Values per block.
        block: usize,
        /// Values per row that were given.
        cols: usize,
    },
    /// A byte range that is shorter or longer than the shape says.
    #[error("a {format} tensor of {rows} x {cols} needs {expected} bytes, found {found}; the file is damaged")]
    ByteLength {
        /// GGUF name of the format.
        format: &'static str,
        /// Rows.
        rows: usize,
        /// Values per row.
        cols: usize,
        /// Bytes that shape and format need.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// A byte range outside of its buffer.
    #[error("bytes {start}..{end} lie outside of a buffer of {len} bytes; the file is damaged")]
    ByteRange {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// Length of the buffer.
        len: usize,
    },
    /// A shape whose size does not fit in memory arithmetic, or that is empty.
    #[error("{what} of {size} is not usable; it must be between 1 and {max}")]
    Size {
        /// What has this size.
        what: &'static str,
        /// The size.
        size: usize,
        /// Largest usable size.
        max: usize,
    },
    /// Memory that the system refuses.
    #[error("the system refused {bytes} bytes for {what}; lower the memory of this model in the launch file")]
    Memory {
        /// What the memory is for.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A core that does not exist or that this process may not use.
    #[error("core {core} cannot be used: {reason}; cores of this process are {usable:?}")]
    Core {
        /// Core number as in the launch file.
        core: usize,
        /// What the system said.
        reason: String,
        /// Cores this process may use.
        usable: Vec<usize>,
    },
    /// A worker thread that could not be started.
    #[error("worker thread {index} could not be started: {reason}; lower the threads of this model")]
    Thread {
        /// Index of the worker.
        index: usize,
        /// What the system said.
        reason: String,
    },
    /// An instruction set that this machine lacks.
    #[error("this machine lacks {isa}; leave the instruction set unset to use the best it has")]
    Isa {
        /// Name of the instruction set.
        isa: &'static str,
    },
}
