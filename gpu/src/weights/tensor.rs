//! Tensors as they lie in mapped files, under one neutral naming. Owner: the loaded model. Invariant: every entry was
//! checked against the length of its file before it is handed out, so a slice never leaves the mapping.

use super::error::{Result, WeightsError};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenrouter_kernels::Bytes;
use tokenrouter_kernels::quant::Format;

/// A file mapped read-only.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps a file; nothing is read until it is touched.
    ///
    /// # Errors
    /// [`WeightsError::Io`] when it cannot be opened or mapped, [`WeightsError::Truncated`] when it is empty.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let file = File::open(path).map_err(|reason| WeightsError::io(path, reason))?;
        let len = file.metadata().map_err(|reason| WeightsError::io(path, reason))?.len();
        if len == 0 {
            return Err(WeightsError::Truncated { file: path.to_owned(), what: "the header".into(), end: 1, len });
        }
        // SAFETY: the mapping is read-only and private to this value. Model files are treated as immutable: whoever
        // rewrites or shortens one while it is served breaks the reader as with any mapped library.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|reason| WeightsError::io(path, reason))?;
        Ok(Arc::new(MappedFile { path: path.to_owned(), map }))
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// One tensor as stored: a row-major matrix of `rows` by `cols`, rows made of whole blocks of `format`.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Neutral name, e.g. `layers.3.attn_q.weight`.
    pub name: String,
    /// Number of rows (1 for a vector) and of elements per row.
    pub shape: [usize; 2],
    /// Storage format of the elements.
    pub format: Format,
    /// `rows * format.row_bytes(cols)` bytes.
    pub bytes: Bytes,
}

impl Tensor {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements per row.
    pub fn cols(&self) -> usize {
        self.shape[1]
    }
}

/// Where one tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Name in the file.
    pub source: String,
    /// Index into the list of files.
    pub file: usize,
    /// Shape, outermost dimension first.
    pub dims: Vec<u64>,
    /// Storage format.
    pub format: Format,
    /// Bytes in the file; checked against its length and against shape and format.
    pub range: Range<usize>,
}

impl Entry {
    /// The shape as a matrix: a vector is one row; more than two dimensions have none.
    fn matrix(&self) -> Option<[usize; 2]> {
        match self.dims[..] {
            [cols] => Some([1, usize::try_from(cols).ok()?]),
            [rows, cols] => Some([usize::try_from(rows).ok()?, usize::try_from(cols).ok()?]),
            _ => None,
        }
    }
}

/// All tensors of a model under neutral names, still in their files.
#[derive(Clone, Debug)]
pub struct Weights {
    origin: PathBuf,
    files: Vec<Arc<MappedFile>>,
    entries: HashMap<String, Entry>,
}

impl Weights {
    /// Collects checked entries; `neutral` gives the neutral name of a source name, or nothing for one that no model reads.
    pub(super) fn new(
        origin: &Path,
        files: Vec<Arc<MappedFile>>,
        sources: Vec<Entry>,
        neutral: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let mut entries = HashMap::with_capacity(sources.len());
        for entry in sources {
            let Some(name) = neutral(&entry.source) else {
                tracing::debug!(tensor = entry.source, "no model reads this tensor");
                continue;
            };
            let (file, source) = (files[entry.file].path().to_owned(), entry.source.clone());
            if let Some(other) = entries.insert(name, entry) {
                let reason = format!("is the same tensor as {:?}; keep one", other.source);
                return Err(WeightsError::invalid(&file, format!("tensor {source:?}"), reason));
            }
        }
        Ok(Weights { origin: origin.to_owned(), files, entries })
    }

    /// The file or directory the weights come from.
    pub fn origin(&self) -> &Path {
        &self.origin
    }

    /// Whether a tensor of this neutral name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Neutral names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Bytes of all tensors as stored.
    pub fn total_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// Bytes per storage format, largest first.
    pub fn formats(&self) -> Vec<(Format, u64)> {
        let mut sums: Vec<(Format, u64)> = Vec::new();
        for entry in self.entries.values() {
            let bytes = entry.range.len() as u64;
            match sums.iter_mut().find(|(format, _)| *format == entry.format) {
                Some((_, sum)) => *sum += bytes,
                None => sums.push((entry.format, bytes)),
            }
        }
        sums.sort_by_key(|&(format, bytes)| (std::cmp::Reverse(bytes), format.name()));
        sums
    }

    /// The tensor of a neutral name.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`] when there is none, [`WeightsError::Shape`] when it is not a vector or matrix.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let file = &self.files[entry.file];
        let shape = entry.matrix().ok_or_else(|| self.shape_error(entry, &[0, 0]))?;
        let bytes = Bytes::new(file.clone(), entry.range.clone()).map_err(|reason| {
            WeightsError::invalid(file.path(), format!("tensor {:?}", entry.source), reason.to_string())
        })?;
        Ok(Tensor { name: name.to_owned(), shape, format: entry.format, bytes })
    }

    /// Checks that a tensor exists and has this shape (a vector is one row), without touching its data.
    ///
    /// # Errors
    /// As [`Self::tensor`], and [`WeightsError::Shape`] for another shape.
    pub fn expect(&self, name: &str, shape: [usize; 2]) -> Result<()> {
        let entry = self.entry(name)?;
        if entry.matrix() == Some(shape) { Ok(()) } else { Err(self.shape_error(entry, &shape)) }
    }

    /// Shape of a tensor, outermost dimension first, if it exists.
    pub(super) fn dims(&self, name: &str) -> Option<&[u64]> {
        self.entries.get(name).map(|entry| &entry.dims[..])
    }

    /// Drops a tensor that the configuration says not to use.
    pub(super) fn discard(&mut self, name: &str) {
        self.entries.remove(name);
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| WeightsError::MissingTensor {
            file: self.origin.clone(),
            tensor: name.to_owned(),
            remedy: "the model is incomplete or not of the architecture it names",
        })
    }

    fn shape_error(&self, entry: &Entry, expected: &[usize]) -> WeightsError {
        WeightsError::Shape {
            file: self.files[entry.file].path().to_owned(),
            tensor: entry.source.clone(),
            found: entry.dims.clone(),
            expected: expected.iter().map(|&dim| dim as u64).collect(),
        }
    }
}

/// Bytes that a tensor of this shape takes, or why it cannot exist.
pub(super) fn byte_len(dims: &[u64], format: Format) -> std::result::Result<u64, String> {
    let Some(&cols) = dims.last() else {
        return Err("has no dimensions".into());
    };
    if dims.contains(&0) {
        return Err(format!("has an empty dimension in its shape {dims:?}"));
    }
    let block = format.block_values() as u64;
    if !cols.is_multiple_of(block) {
        return Err(format!(
            "has rows of {cols} elements, which is no multiple of the {} block of {block}",
            format.name()
        ));
    }
    dims.iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| (elements / block).checked_mul(format.block_bytes() as u64))
        .ok_or_else(|| format!("has a shape {dims:?} beyond any memory"))
}

/// The range of `len` bytes from `start` in a file of `file_len` bytes, if it lies inside.
pub(super) fn range_in_file(start: u64, len: u64, file_len: u64) -> std::result::Result<Range<usize>, u64> {
    let end = start.checked_add(len).ok_or(u64::MAX)?;
    if end > file_len {
        return Err(end);
    }
    match (usize::try_from(start), usize::try_from(end)) {
        (Ok(start), Ok(end)) => Ok(start..end),
        _ => Err(end),
    }
}
