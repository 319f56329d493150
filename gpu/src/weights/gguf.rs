//! GGUF versions 2 and 3: typed metadata and a table of tensors over a mapped file.
//! Owner: the loaded model. Invariant: a count, length or offset of the file is believed only after it was checked
//! against the bytes that are there; a [`Gguf`] that exists has every tensor inside its file.
//! Layout: the GGUF specification in the ggml repository (docs/gguf.md).

use super::error::{Result, WeightsError};
use super::metadata::{Metadata, Value};
use super::tensor::{Entry, MappedFile, byte_len, range_in_file};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use tokenrouter_kernels::quant::Format;

/// Most metadata keys, and most tensors, of one file.
const MAX_ENTRIES: u64 = 65_536;
/// Most array elements in the metadata of one file.
const MAX_ELEMENTS: usize = 1 << 24;
/// Longest metadata key or tensor name, bytes.
const MAX_NAME_BYTES: u64 = 65_535;
/// Longest metadata string, bytes.
const MAX_STRING_BYTES: u64 = 64 << 20;
/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Deepest nesting of arrays in the metadata.
const MAX_DEPTH: usize = 4;
/// Alignment of tensor data where the file names none, bytes.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A GGUF file: metadata and tensor table are read, tensor data is mapped.
#[derive(Debug)]
pub struct Gguf {
    file: Arc<MappedFile>,
    metadata: Metadata,
    entries: Vec<Entry>,
}

impl Gguf {
    /// Maps a file and checks its header, metadata and tensor table.
    ///
    /// # Errors
    /// Any [`WeightsError`] that names a fault of the file, except those about the architecture.
    pub fn open(path: &Path) -> Result<Self> {
        let file = MappedFile::open(path)?;
        let mut reader = Reader { bytes: file.bytes(), at: 0, path, elements: 0 };
        let (tensor_count, key_count) = reader.header()?;
        let metadata = reader.metadata(key_count)?;
        if metadata.get("split.count").and_then(Value::as_u64).is_some_and(|count| count > 1) {
            let reason = "the model is split over several files; join them with `gguf-split --merge`";
            return Err(WeightsError::invalid(path, "key \"split.count\"", reason));
        }
        let raw = reader.tensor_infos(tensor_count)?;
        let alignment = alignment(path, &metadata)?;
        let header_end = reader.at as u64;
        let Some(data_start) = header_end.checked_next_multiple_of(alignment) else {
            return Err(WeightsError::invalid(path, "key \"general.alignment\"", "is beyond any file"));
        };
        let len = file.bytes().len() as u64;
        let entries = raw
            .into_iter()
            .map(|info| info.locate(path, data_start, alignment, len))
            .collect::<Result<Vec<Entry>>>()?;
        Ok(Gguf { file, metadata, entries })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    pub(super) fn file(&self) -> &Arc<MappedFile> {
        &self.file
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

/// Alignment of tensor data in bytes.
fn alignment(path: &Path, metadata: &Metadata) -> Result<u64> {
    let Some(value) = metadata.get("general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_u64() {
        Some(bytes) if bytes.is_power_of_two() && bytes >= 8 => Ok(bytes),
        _ => Err(WeightsError::invalid(
            path,
            "key \"general.alignment\"",
            format!("is {value}; it must be a power of two of at least 8"),
        )),
    }
}

/// A row of the tensor table as read, before it is checked against the file.
struct TensorInfo {
    name: String,
    /// Innermost dimension first, as GGUF stores it.
    dims: Vec<u64>,
    kind: u32,
    /// From the start of the tensor data.
    offset: u64,
}

impl TensorInfo {
    fn locate(self, path: &Path, data_start: u64, alignment: u64, file_len: u64) -> Result<Entry> {
        let what = format!("tensor {:?}", self.name);
        let format = Format::from_ggml(self.kind).ok_or_else(|| WeightsError::UnsupportedFormat {
            file: path.to_owned(),
            tensor: self.name.clone(),
            format: kind_name(self.kind),
            supported: Format::ALL.map(Format::name).join(", "),
        })?;
        if !self.offset.is_multiple_of(alignment) {
            let reason = format!("its offset {} is not aligned to {alignment} bytes", self.offset);
            return Err(WeightsError::invalid(path, what, reason));
        }
        let dims: Vec<u64> = self.dims.into_iter().rev().collect();
        let bytes = byte_len(&dims, format).map_err(|reason| WeightsError::invalid(path, &what, reason))?;
        let range = data_start
            .checked_add(self.offset)
            .ok_or(u64::MAX)
            .and_then(|start| range_in_file(start, bytes, file_len))
            .map_err(|end| WeightsError::Truncated { file: path.to_owned(), what, end, len: file_len })?;
        Ok(Entry { source: self.name, file: 0, dims, format, range })
    }
}

/// Name of a GGUF type number that is not read.
fn kind_name(kind: u32) -> String {
    let name = match kind {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("number {kind}"),
    };
    name.to_owned()
}

/// Reads the head of the file front to back.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
    /// Array elements read so far.
    elements: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8]> {
        let range =
            range_in_file(self.at as u64, len, self.bytes.len() as u64).map_err(|end| WeightsError::Truncated {
                file: self.path.to_owned(),
                what: what.to_owned(),
                end,
                len: self.bytes.len() as u64,
            })?;
        self.at = range.end;
        Ok(&self.bytes[range])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn invalid(&self, what: impl Into<String>, reason: impl Into<String>) -> WeightsError {
        WeightsError::invalid(self.path, what, reason)
    }

    /// Checks magic and version; returns the counts of tensors and metadata keys.
    fn header(&mut self) -> Result<(u64, u64)> {
        let magic: [u8; 4] = self.array("the header")?;
        if &magic != b"GGUF" {
            let shown = String::from_utf8_lossy(&magic).into_owned();
            return Err(self.invalid("the header", format!("starts with {shown:?} instead of \"GGUF\"")));
        }
        match self.u32("the header")? {
            2 | 3 => {}
            1 => return Err(self.invalid("the header", "GGUF version 1 is too old; convert the model again")),
            version if matches!(version.swap_bytes(), 1..=3) => {
                return Err(self.invalid("the header", "the file is big-endian; convert it to little-endian"));
            }
            version => {
                return Err(self.invalid("the header", format!("GGUF version {version} is unknown; 2 and 3 are read")));
            }
        }
        let (tensors, keys) = (self.u64("the header")?, self.u64("the header")?);
        for (what, count) in [("tensors", tensors), ("metadata keys", keys)] {
            if count > MAX_ENTRIES {
                let reason = format!("claims {count} {what}, more than the limit of {MAX_ENTRIES}");
                return Err(self.invalid("the header", reason));
            }
        }
        Ok((tensors, keys))
    }

    fn string(&mut self, what: &str, limit: u64) -> Result<String> {
        let len = self.u64(what)?;
        if len > limit {
            return Err(self.invalid(what, format!("claims a text of {len} bytes, more than the limit of {limit}")));
        }
        let bytes = self.take(len, what)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.invalid(what, "is not UTF-8"))
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata> {
        let mut metadata = Metadata::default();
        for index in 0..count {
            let key = self.string(&format!("metadata key {index}"), MAX_NAME_BYTES)?;
            let what = format!("key {key:?}");
            let kind = self.u32(&what)?;
            let value = self.value(kind, &what, 0)?;
            if metadata.insert(key, value).is_some() {
                return Err(self.invalid(what, "occurs twice"));
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, kind: u32, what: &str, depth: usize) -> Result<Value> {
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.array::<1>(what)?[0])),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.array(what)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(what)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.array(what)?))),
            4 => Value::Unsigned(u64::from(self.u32(what)?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.array(what)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(what)?))),
            7 => match self.array::<1>(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.invalid(what, format!("is a boolean with value {other}"))),
            },
            8 => Value::Text(self.string(what, MAX_STRING_BYTES)?),
            9 => Value::Array(self.values(what, depth)?),
            10 => Value::Unsigned(self.u64(what)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            _ => return Err(self.invalid(what, format!("has the unknown value type {kind}"))),
        })
    }

    fn values(&mut self, what: &str, depth: usize) -> Result<Vec<Value>> {
        if depth == MAX_DEPTH {
            return Err(self.invalid(what, format!("nests arrays more than {MAX_DEPTH} deep")));
        }
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        let bytes_left = self.bytes.len() - self.at;
        let count = match usize::try_from(count) {
            Ok(count) if count <= bytes_left => count,
            _ => {
                let end = count.saturating_add(self.at as u64);
                let (file, what, len) = (self.path.to_owned(), what.to_owned(), self.bytes.len() as u64);
                return Err(WeightsError::Truncated { file, what, end, len });
            }
        };
        self.elements = self.elements.saturating_add(count);
        if self.elements > MAX_ELEMENTS {
            return Err(self.invalid(what, format!("brings the metadata above {MAX_ELEMENTS} array elements")));
        }
        (0..count).map(|_| self.value(kind, what, depth + 1)).collect()
    }

    fn tensor_infos(&mut self, count: u64) -> Result<Vec<TensorInfo>> {
        let mut names = HashSet::new();
        let mut infos = Vec::new();
        for index in 0..count {
            let name = self.string(&format!("name of tensor {index}"), MAX_NAME_BYTES)?;
            let what = format!("tensor {name:?}");
            if !names.insert(name.clone()) {
                return Err(self.invalid(what, "occurs twice"));
            }
            let dim_count = self.u32(&what)?;
            if dim_count == 0 || dim_count > MAX_DIMS {
                return Err(self.invalid(what, format!("has {dim_count} dimensions; 1 to {MAX_DIMS} are possible")));
            }
            let dims = (0..dim_count).map(|_| self.u64(&what)).collect::<Result<Vec<u64>>>()?;
            let (kind, offset) = (self.u32(&what)?, self.u64(&what)?);
            infos.push(TensorInfo { name, dims, kind, offset });
        }
        Ok(infos)
    }
}
