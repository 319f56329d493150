//! torch checkpoints (`torch.save`: a zip archive with a pickle and one file per storage), read without running
//! anything. Owner: conversion of router checkpoints. Invariant: the file is a hostile stranger's until proven otherwise:
//! sizes are checked before memory is taken, and a pickle that wants to call anything is refused by the name it calls.

mod pickle;
mod value;
mod zip;

#[cfg(test)]
pub(crate) mod tests;

pub use value::{StorageType, Value};

use super::error::{Result, WeightsError};
use super::tensor::MappedFile;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use value::{Node, Pickle, StorageNode};
use zip::ZipEntry;

/// Most elements of a tensor that is read.
const MAX_ELEMENTS: u64 = 1 << 30;

/// A torch checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    file: Arc<MappedFile>,
    /// Entries below the archive's folder, by their names there.
    entries: BTreeMap<String, ZipEntry>,
    pickle: Pickle,
}

impl Checkpoint {
    /// Opens a checkpoint and reads its pickle; tensors stay in the file.
    ///
    /// # Errors
    /// [`WeightsError`] naming what is wrong with the archive or what the pickle asks for.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let file = MappedFile::open(path)?;
        let archive = |reason: String| WeightsError::invalid(path, "archive", reason);
        let all = zip::entries(file.bytes()).map_err(archive)?;
        let folder = all.iter().find_map(|entry| entry.name.strip_suffix("data.pkl"));
        let Some(folder) = folder.filter(|folder| folder.is_empty() || folder.ends_with('/')).map(str::to_owned) else {
            return Err(archive("has no data.pkl; it was not made by torch.save".into()));
        };
        let mut entries = BTreeMap::new();
        for entry in all {
            let Some(name) = entry.name.strip_prefix(&folder) else { continue };
            let name = name.to_owned();
            if entries.insert(name.clone(), entry).is_some() {
                return Err(archive(format!("has {name:?} twice")));
            }
        }
        if let Some(order) = entries.get("byteorder") {
            let order = order.bytes(file.bytes()).map_err(archive)?;
            if order != b"little" {
                return Err(archive("is of a big-endian machine; save it again on a little-endian one".into()));
            }
        }
        let code = entries["data.pkl"].bytes(file.bytes()).map_err(archive)?;
        let pickle = pickle::read(code).map_err(|reason| WeightsError::invalid(path, "data.pkl", reason))?;
        Ok(Checkpoint { file, entries, pickle })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.file.bytes().len() as u64
    }

    /// Bytes that a tensor says it has in the file; 0 for a value that is no tensor.
    pub fn stored_bytes(&self, value: Value<'_>) -> u64 {
        let Node::Tensor(tensor) = value.read() else { return 0 };
        let Node::Storage(StorageNode { storage, .. }) = &value.pickle.nodes[tensor.storage] else { return 0 };
        tensor.shape.iter().fold(storage.size() as u64, |bytes, &dim| bytes.saturating_mul(dim))
    }

    /// What was saved.
    pub fn root(&self) -> Value<'_> {
        Value { pickle: &self.pickle, node: self.pickle.root }
    }

    /// The elements of a tensor in row-major order, as f32. `name` is for the error.
    ///
    /// # Errors
    /// [`WeightsError`] for a value that is no tensor, or a tensor that reaches beyond its storage.
    pub fn tensor(&self, name: &str, value: Value<'_>) -> Result<Vec<f32>> {
        self.elements(value).map_err(|reason| WeightsError::invalid(self.path(), format!("tensor {name:?}"), reason))
    }

    fn elements(&self, value: Value<'_>) -> std::result::Result<Vec<f32>, String> {
        let Node::Tensor(tensor) = value.read() else {
            return Err(format!("is {} and no tensor", value.kind()));
        };
        let nodes = &value.pickle.nodes;
        let Node::Storage(StorageNode { key, storage, elements }) = &nodes[tensor.storage] else {
            return Err("has no storage".into());
        };
        let Node::Str(key) = &nodes[*key] else {
            return Err("its storage has no name".into());
        };
        let (size, shape, strides) = (storage.size(), &tensor.shape, &tensor.strides);
        let count = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let Some(count) = count.filter(|&count| count <= MAX_ELEMENTS) else {
            return Err(format!("has a shape {shape:?} beyond the limit of {MAX_ELEMENTS} elements"));
        };
        let name = format!("data/{key}");
        let entry = self.entries.get(&name).ok_or_else(|| format!("its storage {name:?} is not in the archive"))?;
        let stored = (entry.range.len() / size) as u64;
        if *elements != stored || entry.range.len() % size != 0 {
            let bytes = entry.range.len();
            return Err(format!("its storage has {bytes} bytes, which are not {elements} elements of {size}"));
        }
        if count > stored {
            return Err(format!("of shape {shape:?} repeats its storage of {stored} elements"));
        }
        if count == 0 {
            return Ok(Vec::new());
        }
        // The last element is the farthest: strides are not negative.
        let reach = shape.iter().zip(strides).try_fold(tensor.offset, |sum, (dim, stride)| {
            (dim - 1).checked_mul(*stride).and_then(|step| sum.checked_add(step))
        });
        if reach.is_none_or(|last| last >= stored) {
            return Err(format!(
                "of shape {shape:?} and strides {strides:?} reaches beyond its storage of {stored} elements"
            ));
        }
        let bytes = entry.bytes(self.file.bytes())?;
        let mut out = Vec::with_capacity(count as usize);
        let mut index = vec![0u64; shape.len()];
        for _ in 0..count {
            let place = index.iter().zip(strides).fold(tensor.offset, |sum, (i, stride)| sum + i * stride);
            out.push(storage.read(&bytes[place as usize * size..][..size]));
            for (i, dim) in index.iter_mut().zip(shape).rev() {
                *i += 1;
                if *i < *dim {
                    break;
                }
                *i = 0;
            }
        }
        Ok(out)
    }
}
