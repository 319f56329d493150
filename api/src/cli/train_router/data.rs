//! Labelled positions in memory. Owner: the command. Invariant: all rows are of the same two models, every number is
//! finite, and rows of one problem are never on both sides of a split.

use super::network::Inputs;
use crate::cli::CliError;
use crate::cli::label::shards::{FORMAT, MANIFEST, Manifest, Settings};
use candle_core::{Device, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_gpu::heads::HeadConfig;

/// What the shards hold.
#[derive(Debug)]
pub struct Data {
    /// Settings of the first folder; the models are those of all folders.
    pub settings: Settings,
    /// `[rows, hidden_size]`.
    pub hidden: Vec<f32>,
    /// `[rows, top_k]`, `top_k` being the least of all folders.
    pub top: Vec<f32>,
    /// The small model's tokens.
    pub candidate: Vec<TokenId>,
    /// Whether they are divergent.
    pub divergent: Vec<bool>,
    /// Problem of each row, counted through all folders.
    problem: Vec<u32>,
    /// Problems of all folders.
    problems: u32,
}

/// Rows for training and rows for validation.
#[derive(Debug)]
pub struct Split {
    /// Rows that gradients come from.
    pub training: Vec<usize>,
    /// Rows of other problems.
    pub validation: Vec<usize>,
}

impl Data {
    /// Reads all shards of all folders.
    ///
    /// # Errors
    /// [`CliError::Usage`] naming the folder or file, what is wrong and what to do.
    pub fn read(folders: &[PathBuf]) -> Result<Data, CliError> {
        let manifests = folders.iter().map(|folder| manifest(folder)).collect::<Result<Vec<_>, _>>()?;
        let first = &manifests.first().ok_or_else(|| CliError::Usage("name a folder of shards".into()))?.settings;
        for (at, (folder, manifest)) in folders.iter().zip(&manifests).enumerate() {
            same_models(first, &manifest.settings, (&folders[0], folder))?;
            let again = manifests[..at].iter().position(|m| m.settings.fingerprint == manifest.settings.fingerprint);
            if let Some(again) = again {
                let (one, two) = (folders[again].display(), folder.display());
                return Err(CliError::Usage(format!(
                    "{one} and {two} hold the same problems, which would be in training and validation at once; name one of them"
                )));
            }
        }
        let least = manifests.iter().map(|manifest| manifest.settings.top_k).min().unwrap_or_default();
        let mut data = Data {
            settings: Settings { top_k: least, ..first.clone() },
            hidden: Vec::new(),
            top: Vec::new(),
            candidate: Vec::new(),
            divergent: Vec::new(),
            problem: Vec::new(),
            problems: 0,
        };
        for (folder, manifest) in folders.iter().zip(&manifests) {
            for shard in &manifest.shards {
                data.add(&folder.join(&shard.file), &manifest.settings)?;
            }
            data.problems += manifest.settings.problems as u32;
        }
        Ok(data)
    }

    fn add(&mut self, path: &Path, settings: &Settings) -> Result<(), CliError> {
        let usage = |reason: String| CliError::Usage(format!("{}: {reason}; label into a new folder", path.display()));
        let bytes = std::fs::read(path).map_err(|error| usage(error.to_string()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| usage(error.to_string()))?;
        let column = Column { tensors: &tensors, rows: None }.u32s("candidate").map_err(usage)?;
        let columns = Column { tensors: &tensors, rows: Some(column.len()) };
        let label = columns.u32s("label").map_err(usage)?;
        let problem = columns.u32s("problem").map_err(usage)?;
        let hidden = columns.f32s("hidden", settings.hidden_size).map_err(usage)?;
        let top = columns.f32s("top", settings.top_k).map_err(usage)?;
        if let Some(wrong) = label.iter().find(|&&label| label > 1) {
            return Err(usage(format!("`label` has the value {wrong}; it must be 0 or 1")));
        }
        if let Some(wrong) = problem.iter().find(|&&problem| problem as usize >= settings.problems) {
            return Err(usage(format!("`problem` has the value {wrong}, but {MANIFEST} has {}", settings.problems)));
        }
        self.candidate.extend(column);
        self.divergent.extend(label.iter().map(|&label| label == 1));
        self.problem.extend(problem.iter().map(|&problem| self.problems + problem));
        self.hidden.extend(hidden);
        let least = self.settings.top_k;
        self.top.extend(top.chunks(settings.top_k.max(1)).flat_map(|row| row[..least].iter()));
        Ok(())
    }

    /// How many of these rows are divergent.
    pub fn divergent_of(&self, rows: &[usize]) -> usize {
        rows.iter().filter(|&&row| self.divergent[row]).count()
    }

    /// Puts this share of the problems, drawn from the seed, aside for validation.
    ///
    /// # Errors
    /// [`CliError::Usage`] when either side has rows of one label only.
    pub fn split(&self, share: f64, seed: u64) -> Result<Split, CliError> {
        let present: BTreeSet<u32> = self.problem.iter().copied().collect();
        let mut drawn: Vec<u32> = present.into_iter().collect();
        drawn.sort_by_key(|&problem| (rng::bits(seed, problem, Stream::Owner), problem));
        drawn.truncate((drawn.len() as f64 * share).round() as usize);
        let aside: BTreeSet<u32> = drawn.into_iter().collect();
        let (validation, training): (Vec<usize>, Vec<usize>) =
            (0..self.problem.len()).partition(|&row| aside.contains(&self.problem[row]));
        for (rows, side) in [(&training, "training"), (&validation, "validation")] {
            let divergent = self.divergent_of(rows);
            if divergent == 0 || divergent == rows.len() {
                return Err(CliError::Usage(format!(
                    "{side} has {} rows, {divergent} of them with label 1; a head learns from both labels: label more problems, or change --validation",
                    rows.len()
                )));
            }
        }
        Ok(Split { training, validation })
    }
}

/// Rows as a network takes them.
pub struct Batches<'a> {
    /// The rows.
    pub data: &'a Data,
    /// What the network reads of them.
    pub config: &'a HeadConfig,
    /// Embeddings of the candidates.
    pub embeddings: &'a Embeddings,
}

/// Embeddings of some tokens.
#[derive(Debug, Default)]
pub struct Embeddings {
    /// The tokens, ascending.
    pub tokens: Vec<TokenId>,
    /// `[tokens, width]`.
    pub values: Vec<f32>,
    /// Width of a row.
    pub width: usize,
}

impl Batches<'_> {
    /// Inputs of these rows.
    ///
    /// # Errors
    /// When there is no memory, or a candidate has no embedding.
    pub fn inputs(&self, rows: &[usize]) -> candle_core::Result<Inputs> {
        let Batches { data, config, embeddings } = *self;
        let reads = config.class.inputs();
        let (hidden, kept) = (data.settings.hidden_size, data.settings.top_k);
        let mut inputs = Inputs::default();
        if reads.hidden {
            inputs.hidden = Some(gathered(rows, hidden, |&row| &data.hidden[row * hidden..])?);
        }
        if reads.token {
            let found = rows.iter().map(|&row| embeddings.tokens.binary_search(&data.candidate[row]));
            let found = found.collect::<Result<Vec<usize>, usize>>();
            let found = found.map_err(|_| candle_core::Error::Msg("a candidate has no embedding".into()))?;
            let width = embeddings.width;
            inputs.embedding = Some(gathered(&found, width, |&at| &embeddings.values[at * width..])?);
        }
        if reads.logits {
            inputs.top = Some(gathered(rows, config.logits_size, |&row| &data.top[row * kept..])?);
        }
        Ok(inputs)
    }

    /// 1 for divergent rows, 0 for others, `[rows]`.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn targets(&self, rows: &[usize]) -> candle_core::Result<Tensor> {
        let targets: Vec<f32> = rows.iter().map(|&row| f32::from(u8::from(self.data.divergent[row]))).collect();
        Tensor::from_vec(targets, rows.len(), &Device::Cpu)
    }
}

fn gathered<'a>(rows: &[usize], width: usize, from: impl Fn(&usize) -> &'a [f32]) -> candle_core::Result<Tensor> {
    let values: Vec<f32> = rows.iter().flat_map(|row| from(row)[..width].iter().copied()).collect();
    Tensor::from_vec(values, (rows.len(), width), &Device::Cpu)
}

fn manifest(folder: &Path) -> Result<Manifest, CliError> {
    let path = folder.join(MANIFEST);
    let usage = |reason: String| CliError::Usage(format!("{}: {reason}", path.display()));
    let bytes = std::fs::read(&path).map_err(|error| usage(format!("{error}; name a folder that label wrote")))?;
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| usage(error.to_string()))?;
    if manifest.format != FORMAT {
        let found = manifest.format;
        return Err(usage(format!("format is {found}, this version reads {FORMAT}; label into a new folder")));
    }
    if manifest.shards.is_empty() {
        return Err(usage("lists no shard; let label finish one".into()));
    }
    Ok(manifest)
}

fn same_models(one: &Settings, two: &Settings, (first, folder): (&Path, &Path)) -> Result<(), CliError> {
    let of = |s: &Settings| {
        let Settings { small, small_parameters, large, large_parameters, hidden_size, .. } = s.clone();
        [
            ("small", format!("{small} with {small_parameters} weights")),
            ("large", format!("{large} with {large_parameters} weights")),
            ("hidden_size", hidden_size.to_string()),
        ]
    };
    let different = of(one).into_iter().zip(of(two)).find(|(a, b)| a != b);
    different.map_or(Ok(()), |((field, a), (_, b))| {
        Err(CliError::Usage(format!(
            "{}: {field} is {b}, but in {} it is {a}; train a head from shards of one pair of models",
            folder.join(MANIFEST).display(),
            first.join(MANIFEST).display()
        )))
    })
}

/// Columns of a shard with this number of rows.
struct Column<'a> {
    tensors: &'a SafeTensors<'a>,
    rows: Option<usize>,
}

impl Column<'_> {
    fn words(&self, name: &str, dtype: Dtype, width: Option<usize>) -> Result<Vec<[u8; 4]>, String> {
        let tensor = self.tensors.tensor(name).map_err(|_| format!("has no tensor `{name}`"))?;
        let rows = self.rows.or(tensor.shape().first().copied()).unwrap_or_default();
        let shape: Vec<usize> = [rows].into_iter().chain(width).collect();
        if tensor.dtype() != dtype || tensor.shape() != shape {
            let (found, at) = (tensor.dtype(), tensor.shape());
            return Err(format!("`{name}` is {found:?} {at:?}; it must be {dtype:?} {shape:?}"));
        }
        Ok(tensor.data().as_chunks::<4>().0.to_vec())
    }

    fn u32s(&self, name: &str) -> Result<Vec<u32>, String> {
        Ok(self.words(name, Dtype::U32, None)?.into_iter().map(u32::from_le_bytes).collect())
    }

    fn f32s(&self, name: &str, width: usize) -> Result<Vec<f32>, String> {
        let values: Vec<f32> = self.words(name, Dtype::F32, Some(width))?.into_iter().map(f32::from_le_bytes).collect();
        match values.iter().find(|value| !value.is_finite()) {
            Some(wrong) => Err(format!("`{name}` has the value {wrong}")),
            None => Ok(values),
        }
    }
}
