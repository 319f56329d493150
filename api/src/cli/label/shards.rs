//! What `label` writes: safetensors shards and `manifest.json`. Owner: the command. Invariant: the manifest names only
//! shards that are complete, and all of them were made with the settings it records.
//!
//! Tensors of a shard, one row a position: `hidden` f32 `[rows, hidden_size]`, `top` f32 `[rows, top_k]` (raw logits,
//! descending), and u32 `[rows]`: `candidate` (the small model's token), `large` (the large model's token), `label` (1 =
//! divergent, 0 = neutral or the same token), `problem`, `position` (in the answer). Features are those of the small
//! model one token earlier: the step that produced `candidate`.

use crate::cli::{CliError, files};
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use tokenrouter_core::executor::Signals;
use tokenrouter_core::ids::TokenId;

/// Name of the manifest in the folder.
pub const MANIFEST: &str = "manifest.json";
/// Version of the layout.
pub const FORMAT: u32 = 1;

/// Everything that decides what a shard holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Name of the small model.
    pub small: String,
    /// Its number of weights.
    pub small_parameters: u64,
    /// Name of the large model.
    pub large: String,
    /// Its number of weights.
    pub large_parameters: u64,
    /// Width of a hidden row.
    pub hidden_size: usize,
    /// Logits of a row.
    pub top_k: usize,
    /// The judge.
    pub judge: String,
    /// Longest answer.
    pub max_tokens: usize,
    /// Problems in a shard.
    pub shard_problems: usize,
    /// Problems in all.
    pub problems: usize,
    /// FNV-1a over the tokens of all prompts and the right answers.
    pub fingerprint: String,
}

/// Counts of positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Labelled positions.
    pub rows: u64,
    /// Positions where the two models' tokens differ.
    pub differing: u64,
    /// Of these, label 1.
    pub divergent: u64,
    /// Of these, left out because the judge could not tell.
    pub unknown: u64,
}

impl Counts {
    /// Both together.
    pub fn plus(self, other: Counts) -> Counts {
        Counts {
            rows: self.rows + other.rows,
            differing: self.differing + other.differing,
            divergent: self.divergent + other.divergent,
            unknown: self.unknown + other.unknown,
        }
    }
}

/// A finished shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// File in the folder.
    pub file: String,
    /// What is in it.
    pub counts: Counts,
}

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// How all shards were made.
    pub settings: Settings,
    /// The finished shards, in the order of the problems.
    pub shards: Vec<Shard>,
}

/// A folder of shards that is being filled.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// What is there already.
    pub manifest: Manifest,
}

impl Folder {
    /// Opens a folder: one that is new, or one whose shards were made with the same settings.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a folder of other settings, [`CliError::Io`] when it cannot be written.
    pub fn open(path: &Path, settings: Settings) -> Result<Folder, CliError> {
        std::fs::create_dir_all(path).map_err(|error| at(path, &error))?;
        let file = path.join(MANIFEST);
        let manifest = match std::fs::read(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Manifest { format: FORMAT, settings, shards: Vec::new() }
            }
            Err(error) => return Err(at(&file, &error)),
            Ok(bytes) => resumed(&file, &bytes, settings)?,
        };
        if let Some(gone) = manifest.shards.iter().find(|shard| !path.join(&shard.file).is_file()) {
            let (folder, file) = (path.display(), &gone.file);
            return Err(CliError::Usage(format!("{folder}: {file} of {MANIFEST} is gone; label into a new folder")));
        }
        Ok(Folder { path: path.to_owned(), manifest })
    }

    /// Adds the next shard and then its line in the manifest; each file is written aside and renamed.
    ///
    /// # Errors
    /// [`CliError::Io`] when the disk refuses.
    pub fn add(&mut self, rows: &Rows) -> Result<(), CliError> {
        let file = format!("shard-{:05}.safetensors", self.manifest.shards.len());
        let settings = &self.manifest.settings;
        self.write(&file, &rows.bytes(settings.hidden_size, settings.top_k)?)?;
        self.manifest.shards.push(Shard { file, counts: rows.counts });
        let text = serde_json::to_vec_pretty(&self.manifest).map_err(io::Error::from)?;
        self.write(MANIFEST, &text)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CliError> {
        let path = self.path.join(name);
        files::whole(&path, bytes).map_err(|error| at(&path, &error))
    }

    /// Counts of all finished shards.
    pub fn counts(&self) -> Counts {
        self.manifest.shards.iter().fold(Counts::default(), |sum, shard| sum.plus(shard.counts))
    }
}

fn resumed(file: &Path, bytes: &[u8], settings: Settings) -> Result<Manifest, CliError> {
    let usage = |reason: String| CliError::Usage(format!("{}: {reason}", file.display()));
    let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| usage(error.to_string()))?;
    if manifest.format != FORMAT {
        return Err(usage(format!(
            "format is {}, this version writes {FORMAT}; label into a new folder",
            manifest.format
        )));
    }
    if manifest.settings != settings {
        let (found, now) = (json(&manifest.settings), json(&settings));
        return Err(usage(format!(
            "its shards were made with {found}, now it is {now}; use the same options or a new folder"
        )));
    }
    Ok(manifest)
}

fn json(settings: &Settings) -> String {
    serde_json::to_string(settings).unwrap_or_else(|_| format!("{settings:?}"))
}

fn at(path: &Path, error: &io::Error) -> CliError {
    CliError::Io(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// One labelled position.
#[derive(Debug)]
pub struct Labelled<'a> {
    /// The small model's signals.
    pub signals: &'a Signals,
    /// Its token.
    pub candidate: TokenId,
    /// The large model's token.
    pub large: TokenId,
    /// 1 = divergent.
    pub label: u32,
    /// Index of the problem in the whole file.
    pub problem: u32,
    /// Index of the token in the answer.
    pub position: u32,
}

/// Rows of a shard in memory, column by column.
#[derive(Debug, Default)]
pub struct Rows {
    pub(super) hidden: Vec<f32>,
    pub(super) top: Vec<f32>,
    pub(super) columns: [Vec<u32>; 5],
    /// What was counted.
    pub counts: Counts,
}

/// Names of the columns, in the order of `Rows::columns`.
const COLUMNS: [&str; 5] = ["candidate", "large", "label", "problem", "position"];

impl Rows {
    /// Adds a row.
    pub fn push(&mut self, row: &Labelled<'_>) {
        self.hidden.extend_from_slice(&row.signals.hidden);
        self.top.extend(row.signals.top.iter().map(|&(_, logit)| logit));
        let values = [row.candidate, row.large, row.label, row.problem, row.position];
        for (column, value) in self.columns.iter_mut().zip(values) {
            column.push(value);
        }
        self.counts.rows += 1;
    }

    fn bytes(&self, hidden_size: usize, top_k: usize) -> Result<Vec<u8>, CliError> {
        let rows = self.columns[0].len();
        let floats = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
        let mut tensors = vec![
            ("hidden", Dtype::F32, vec![rows, hidden_size], floats(&self.hidden)),
            ("top", Dtype::F32, vec![rows, top_k], floats(&self.top)),
        ];
        for (name, column) in COLUMNS.into_iter().zip(&self.columns) {
            let bytes = column.iter().flat_map(|value| value.to_le_bytes()).collect();
            tensors.push((name, Dtype::U32, vec![rows], bytes));
        }
        let failed = |error: safetensors::SafeTensorError| CliError::Io(io::Error::other(error.to_string()));
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            Ok((*name, TensorView::new(*dtype, shape.clone(), bytes).map_err(failed)?))
        });
        safetensors::serialize(views.collect::<Result<Vec<_>, CliError>>()?, None).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    fn settings(judge: &str) -> Settings {
        Settings {
            small: "small".into(),
            small_parameters: 1,
            large: "large".into(),
            large_parameters: 2,
            hidden_size: 2,
            top_k: 3,
            judge: judge.into(),
            max_tokens: 8,
            shard_problems: 1,
            problems: 2,
            fingerprint: "00".into(),
        }
    }

    fn rows() -> Rows {
        let signals =
            |x: f32| Signals { hidden: vec![x, -x], top: vec![(9, 3.0 * x), (4, x), (1, 0.5)], ..Signals::default() };
        let mut rows = Rows::default();
        for (position, x) in [(0, 1.0), (1, 2.5)] {
            let signals = &signals(x);
            rows.push(&Labelled { signals, candidate: 9, large: 4, label: position, problem: 7, position });
        }
        rows
    }

    #[test]
    fn a_folder_is_filled_reopened_and_read() {
        let path = std::env::temp_dir().join(format!("tokenrouter-shards-{}", std::process::id()));
        let mut folder = Folder::open(&path, settings("equal")).expect("a new folder");
        folder.add(&rows()).expect("a shard");
        let mut folder = Folder::open(&path, settings("equal")).expect("the same settings");
        assert_eq!(folder.counts().rows, 2);
        folder.add(&rows()).expect("a second shard");
        let bytes = std::fs::read(path.join("shard-00001.safetensors")).expect("the second shard");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let read = |name: &str| tensors.tensor(name).expect(name);
        let floats = |name: &str| -> Vec<f32> {
            let bytes = read(name).data().as_chunks::<4>().0;
            bytes.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
        };
        assert_eq!((read("hidden").shape(), floats("hidden")), (&[2, 2][..], vec![1.0, -1.0, 2.5, -2.5]));
        assert_eq!((read("top").shape(), floats("top")), (&[2, 3][..], vec![3.0, 1.0, 0.5, 7.5, 2.5, 0.5]));
        assert_eq!(read("label").data(), [0, 0, 0, 0, 1, 0, 0, 0]);
        let other = Folder::open(&path, settings("exact")).expect_err("other settings").to_string();
        assert!(other.contains("new folder") && other.contains("exact"), "{other}");
        std::fs::remove_file(path.join("shard-00000.safetensors")).expect("removed");
        let gone = Folder::open(&path, settings("equal")).expect_err("a shard is gone").to_string();
        assert!(gone.contains("shard-00000"), "{gone}");
        std::fs::remove_dir_all(&path).expect("removed");
    }
}
