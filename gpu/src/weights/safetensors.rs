//! safetensors checkpoints, one file or sharded, mapped. Owner: the loaded model. Invariant: header parsing and the check
//! that tensors tile the file exactly are the `safetensors` crate's; this module adds names, formats and shards.

use super::error::{Result, WeightsError};
use super::json::{self, Json};
use super::tensor::{Entry, MappedFile, byte_len, range_in_file};
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use tokenrouter_kernels::quant::Format;

/// Most shards of one checkpoint.
const MAX_SHARDS: usize = 4096;
/// Name of an unsharded checkpoint.
const SINGLE: &str = "model.safetensors";
/// Name of the table of a sharded checkpoint.
const INDEX: &str = "model.safetensors.index.json";

/// Maps the checkpoint of a directory and lists its tensors.
///
/// # Errors
/// A missing checkpoint, a shard outside the directory, a tensor that is missing, repeated, truncated or in a format
/// that is not read.
pub(super) fn open(dir: &Path) -> Result<(Vec<Arc<MappedFile>>, Vec<Entry>)> {
    let single = dir.join(SINGLE);
    if single.exists() {
        let file = MappedFile::open(&single)?;
        let entries = entries(&file, 0)?;
        return Ok((vec![file], entries));
    }
    let index = dir.join(INDEX);
    if !index.exists() {
        let reason = format!("has neither {SINGLE} nor {INDEX}; only safetensors and GGUF weights are read");
        return Err(WeightsError::invalid(dir, "directory", reason));
    }
    open_shards(dir, &index)
}

fn open_shards(dir: &Path, index: &Path) -> Result<(Vec<Arc<MappedFile>>, Vec<Entry>)> {
    let table = weight_map(index)?;
    let shards: BTreeSet<&str> = table.values().map(String::as_str).collect();
    if shards.len() > MAX_SHARDS {
        let reason = format!("names {} files, more than the limit of {MAX_SHARDS}", shards.len());
        return Err(WeightsError::invalid(index, "weight_map", reason));
    }
    let (mut files, mut all) = (Vec::new(), Vec::new());
    for shard in shards {
        let file = MappedFile::open(&dir.join(shard))?;
        let found = entries(&file, files.len())?;
        let names: BTreeSet<&str> = found.iter().map(|entry| entry.source.as_str()).collect();
        for (tensor, _) in table.iter().filter(|(_, file)| *file == shard) {
            if !names.contains(tensor.as_str()) {
                return Err(WeightsError::MissingTensor {
                    file: file.path().to_owned(),
                    tensor: tensor.clone(),
                    remedy: "the index places it here; download the checkpoint again",
                });
            }
        }
        // A tensor that the index places in another shard, or nowhere, is a leftover and not used.
        all.extend(found.into_iter().filter(|entry| table.get(&entry.source).is_some_and(|place| place == shard)));
        files.push(file);
    }
    Ok((files, all))
}

/// Tensor name to file name, every file name checked to stay inside the directory.
fn weight_map(index: &Path) -> Result<BTreeMap<String, String>> {
    let Some(Json::Object(map)) = json::read(index)?.get_mut("weight_map").map(Json::take) else {
        return Err(WeightsError::MissingKey { file: index.to_owned(), key: "weight_map".into() });
    };
    let mut table = BTreeMap::new();
    for (tensor, shard) in map {
        let Json::String(shard) = shard else {
            return Err(WeightsError::invalid(index, format!("tensor {tensor:?}"), "its place is not a file name"));
        };
        let plain = Path::new(&shard).file_name().is_some_and(|name| name == shard.as_str());
        if !plain {
            let reason = format!("its place {shard:?} is not a plain file name");
            return Err(WeightsError::invalid(index, format!("tensor {tensor:?}"), reason));
        }
        table.insert(tensor, shard);
    }
    Ok(table)
}

/// The tensors of one mapped file.
pub(super) fn entries(file: &Arc<MappedFile>, number: usize) -> Result<Vec<Entry>> {
    let (path, bytes) = (file.path(), file.bytes());
    let (header_len, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| refuse(file, error))?;
    refuse_repeated_names(path, &bytes[8..8 + header_len], &metadata)?;
    let (data_start, len) = (8 + header_len as u64, bytes.len() as u64);
    let mut out = Vec::new();
    for (source, info) in metadata.tensors() {
        let what = format!("tensor {source:?}");
        let format = match info.dtype {
            Dtype::F32 => Format::F32,
            Dtype::F16 => Format::F16,
            Dtype::BF16 => Format::BF16,
            other => {
                return Err(WeightsError::UnsupportedFormat {
                    file: path.to_owned(),
                    tensor: source,
                    format: format!("{other:?}"),
                    supported: "F32, F16, BF16".into(),
                });
            }
        };
        let dims: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
        let size = byte_len(&dims, format).map_err(|reason| WeightsError::invalid(path, &what, reason))?;
        let range = data_start
            .checked_add(info.data_offsets.0 as u64)
            .ok_or(u64::MAX)
            .and_then(|start| range_in_file(start, size, len))
            .map_err(|end| WeightsError::Truncated { file: path.to_owned(), what, end, len })?;
        out.push(Entry { source, file: number, dims, format, range });
    }
    Ok(out)
}

/// A JSON object keeps the last of two equal keys; the header must not have any.
fn refuse_repeated_names(path: &Path, header: &[u8], metadata: &Metadata) -> Result<()> {
    let names = json::keys(header).map_err(|reason| WeightsError::invalid(path, "the header", reason))?;
    let mut seen = BTreeSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        return Err(WeightsError::invalid(path, format!("tensor {twice:?}"), "occurs twice"));
    }
    debug_assert!(metadata.tensors().len() <= seen.len());
    Ok(())
}

/// The crate's error in words that name the file and the remedy.
fn refuse(file: &MappedFile, error: SafeTensorError) -> WeightsError {
    let (path, len) = (file.path(), file.bytes().len() as u64);
    let truncated =
        |what: &str, end| WeightsError::Truncated { file: path.to_owned(), what: what.to_owned(), end, len };
    match error {
        SafeTensorError::HeaderTooSmall => truncated("the header", 8),
        SafeTensorError::InvalidHeaderLength => truncated("the header", header_end(file)),
        SafeTensorError::MetadataIncompleteBuffer => match data_end(file) {
            Some((name, end)) if end > len => truncated(&format!("tensor {name:?}"), end),
            _ => WeightsError::invalid(path, "the header", "does not account for every byte of the file"),
        },
        SafeTensorError::InvalidOffset(name) => WeightsError::invalid(
            path,
            format!("tensor {name:?}"),
            "its bytes do not follow those of the tensor before",
        ),
        SafeTensorError::HeaderTooLarge => {
            WeightsError::invalid(path, "the header", "is longer than the format allows")
        }
        other => WeightsError::invalid(path, "the header", other.to_string()),
    }
}

/// First byte behind the header as the file claims it.
fn header_end(file: &MappedFile) -> u64 {
    let claimed = file.bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    claimed.saturating_add(8)
}

/// The tensor that ends last, and the first byte behind it, as the header claims.
fn data_end(file: &MappedFile) -> Option<(String, u64)> {
    let start = header_end(file);
    let header = file.bytes().get(8..usize::try_from(start).ok()?)?;
    let Json::Object(tensors) = serde_json::from_slice(header).ok()? else {
        return None;
    };
    tensors
        .into_iter()
        .filter_map(|(name, info)| Some((name, start.saturating_add(info.get("data_offsets")?.get(1)?.as_u64()?))))
        .max_by_key(|&(_, end)| end)
}
