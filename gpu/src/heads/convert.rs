//! From a published router checkpoint to a converted head. Owner: the command that converts. Invariant: sizes come from
//! the tensors (the authors' own JSON files are wrong about some); what is written opens again, with every tensor of the
//! network and no other.

use super::config::{Class, FORMAT, Family, HeadConfig, R2R_CLASSES};
use super::{CONFIG_FILE, WEIGHTS_FILE};
use crate::weights::WeightsError;
use crate::weights::torch::{Checkpoint, Value};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors of the published state dicts that a converted head does without: the model's own embedding, and a counter.
const DROPPED: [&str; 2] = ["token_embeddings.weight", "mlp.1.num_batches_tracked"];

type Result<T> = std::result::Result<T, WeightsError>;

/// What a conversion found and wrote.
#[derive(Debug)]
pub struct Conversion {
    /// The description that was written.
    pub config: HeadConfig,
    /// Number of weights.
    pub parameters: u64,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// A state dict: tensors by name.
struct StateDict<'a> {
    checkpoint: &'a Checkpoint,
    tensors: BTreeMap<&'a str, Value<'a>>,
}

/// Reads a torch checkpoint of an R2R router (`.pt`) or a CITER router (`.pth`) and writes a converted head to the folder
/// `output`. `hidden_size` is the width of the model's hidden rows, if the user knows it: it decides where the tensors
/// leave a choice, and is an error where they say otherwise.
///
/// # Errors
/// [`WeightsError`] naming what is wrong with the checkpoint, or why the folder could not be written.
pub fn convert(input: &Path, output: &Path, hidden_size: Option<usize>) -> Result<Conversion> {
    let checkpoint = Checkpoint::open(input)?;
    let root = checkpoint.root();
    let wrong = |what: &str, reason: String| WeightsError::invalid(input, what, reason);
    if root.entries().is_none() {
        return Err(wrong("checkpoint", format!("is {} and no dictionary; it is no router", root.kind())));
    }
    let mut notes = Vec::new();
    let (states, config) = match (root.get("state_dict"), root.get("mlp.0.weight")) {
        (Some(states), _) => {
            let states = StateDict::new(&checkpoint, states)?;
            let config = r2r(&states, (root, hidden_size), &mut notes)?;
            (states, config)
        }
        (None, Some(_)) => {
            let states = StateDict::new(&checkpoint, root)?;
            let config = citer(&states)?;
            (states, config)
        }
        (None, None) => {
            let reason = "has neither state_dict (R2R) nor mlp.0.weight (CITER); only routers of these two are read";
            return Err(wrong("checkpoint", reason.to_owned()));
        }
    };
    if let Some(asked) = hidden_size.filter(|&asked| config.class.inputs().hidden && asked != config.hidden_size) {
        let found = config.hidden_size;
        return Err(wrong("tensors", format!("are made for a hidden size of {found}, but {asked} was asked for")));
    }
    config.check().map_err(|reason| wrong("sizes", reason))?;
    let parameters = states.write(&config, output)?;
    Ok(Conversion { config, parameters, notes })
}

fn citer(states: &StateDict<'_>) -> Result<HeadConfig> {
    let [first, hidden_size] = states.matrix("mlp.0.weight")?;
    let [last, _] = states.matrix("mlp.4.weight")?;
    Ok(HeadConfig {
        format: FORMAT,
        family: Family::Citer,
        class: Class::Mlp,
        hidden_size,
        embedding_size: 0,
        logits_size: 0,
        layers: vec![first, last],
        expansion: 0,
        normalize_input: false,
        threshold: None,
        model: None,
    })
}

fn r2r(
    states: &StateDict<'_>,
    (root, asked): (Value<'_>, Option<usize>),
    notes: &mut Vec<String>,
) -> Result<HeadConfig> {
    let wrong = |what: &str, reason: String| WeightsError::invalid(states.checkpoint.path(), what, reason);
    let named = root.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(class) = R2R_CLASSES.into_iter().find(|class| class.name().eq_ignore_ascii_case(named)) else {
        let known = R2R_CLASSES.map(Class::name).join(", ");
        return Err(wrong("model_type", format!("{named:?} is not a network that is read; known are {known}")));
    };
    let argument = |key: &str| root.get("init_args").and_then(|arguments| arguments.get(key));
    if argument("use_position_embedding").and_then(Value::as_bool) == Some(true) {
        return Err(wrong(
            "init_args",
            "use_position_embedding is true; routers with position embeddings are not read".into(),
        ));
    }
    let (layers, expansion) = states.backbone()?;
    let hint = argument("hidden_states_size").and_then(Value::as_i64).and_then(|hint| usize::try_from(hint).ok());
    let Widths { hidden_size, embedding_size, logits_size } = states.widths(class, asked)?;
    if let Some(hint) = hint.filter(|&hint| class.inputs().hidden && hint != hidden_size) {
        notes.push(format!(
            "init_args says hidden_states_size {hint}, the tensors say {hidden_size}; the tensors count"
        ));
    }
    let threshold = root.get("common_args").and_then(|arguments| arguments.get("threshold")).and_then(Value::as_f64);
    if threshold.is_none() {
        notes.push("the checkpoint has no threshold; give one in the launch file".into());
    }
    Ok(HeadConfig {
        format: FORMAT,
        family: Family::R2r,
        class,
        hidden_size,
        embedding_size,
        logits_size,
        layers,
        expansion,
        normalize_input: argument("normalize_input").and_then(Value::as_bool).unwrap_or(false),
        threshold,
        model: argument("pretrained_model_name").and_then(Value::as_str).map(str::to_owned),
    })
}

/// Widths of the inputs of an R2R network.
struct Widths {
    hidden_size: usize,
    embedding_size: usize,
    logits_size: usize,
}

impl<'a> StateDict<'a> {
    fn new(checkpoint: &'a Checkpoint, dict: Value<'a>) -> Result<Self> {
        let wrong = |reason: String| WeightsError::invalid(checkpoint.path(), "state_dict", reason);
        let entries = dict.entries().ok_or_else(|| wrong(format!("is {} and no dictionary", dict.kind())))?;
        let mut tensors = BTreeMap::new();
        for (name, value) in entries {
            let name = name.as_str().ok_or_else(|| wrong(format!("has a key that is {}", name.kind())))?;
            if value.shape().is_none() {
                return Err(wrong(format!("{name:?} is {} and no tensor", value.kind())));
            }
            if tensors.insert(name, value).is_some() {
                return Err(wrong(format!("has {name:?} twice")));
            }
        }
        Ok(StateDict { checkpoint, tensors })
    }

    fn value(&self, name: &str) -> Result<Value<'a>> {
        self.tensors.get(name).copied().ok_or_else(|| WeightsError::MissingTensor {
            file: self.checkpoint.path().to_owned(),
            tensor: name.to_owned(),
            remedy: "the checkpoint is not of the network it names",
        })
    }

    /// Shape as a matrix; a vector is one row.
    fn matrix(&self, name: &str) -> Result<[usize; 2]> {
        let shape = self.value(name)?.shape().unwrap_or_default();
        let size = |dim: u64| usize::try_from(dim).ok();
        let matrix = match *shape {
            [cols] => size(cols).map(|cols| [1, cols]),
            [rows, cols] => size(rows).zip(size(cols)).map(|(rows, cols)| [rows, cols]),
            _ => None,
        };
        matrix.ok_or_else(|| {
            let reason = format!("has shape {shape:?} and is neither vector nor matrix");
            WeightsError::invalid(self.checkpoint.path(), format!("tensor {name:?}"), reason)
        })
    }

    /// Widths of the layers, and how much wider a block is inside.
    fn backbone(&self) -> Result<(Vec<usize>, usize)> {
        let mut layers = Vec::new();
        while self.tensors.contains_key(format!("backbone.blocks.{}.layer_norm.weight", layers.len()).as_str()) {
            let [_, width] = self.matrix(&format!("backbone.blocks.{}.layer_norm.weight", layers.len()))?;
            layers.push(width);
        }
        let [wide, first] = self.matrix("backbone.blocks.0.mlp.0.weight")?;
        Ok((layers, wide / first.max(1)))
    }

    fn widths(&self, class: Class, asked: Option<usize>) -> Result<Widths> {
        let inputs = class.inputs();
        let [projected, logits_size] = if inputs.logits { self.matrix("logits_projection.weight")? } else { [0, 0] };
        if !inputs.hidden {
            return Ok(Widths { hidden_size: 0, embedding_size: 0, logits_size });
        }
        let [_, joined] = self.matrix(&format!("{}.weight", class.join().unwrap_or_default()))?;
        let embedding = self.tensors.contains_key("token_embeddings.weight");
        let hidden_size = match (inputs.logits, inputs.token) {
            (true, _) => projected,
            (false, false) => joined,
            // One sum of two widths: the embedding's own shape, or the user, or else they are equal.
            (false, true) if embedding => joined.saturating_sub(self.matrix("token_embeddings.weight")?[1]),
            (false, true) => asked.unwrap_or(joined / 2),
        };
        let others = hidden_size + if inputs.logits { projected } else { 0 };
        let embedding_size = if inputs.token { joined.saturating_sub(others) } else { 0 };
        Ok(Widths { hidden_size, embedding_size, logits_size })
    }

    /// Writes the folder; returns the number of weights.
    fn write(&self, config: &HeadConfig, folder: &Path) -> Result<u64> {
        let path = self.checkpoint.path();
        let expected = config.tensors();
        let known = |name: &str| DROPPED.contains(&name) || expected.iter().any(|(other, _)| other == name);
        if let Some(extra) = self.tensors.keys().find(|name| !known(name)) {
            let reason = format!("is not a tensor of {} with these sizes", config.class.name());
            return Err(WeightsError::invalid(path, format!("tensor {extra:?}"), reason));
        }
        // Tensors of a router share no storage; if they did, a small file could ask for any amount of memory.
        let stated = expected.iter().filter_map(|(name, _)| self.tensors.get(name.as_str()));
        let stated = stated.fold(0u64, |sum, value| sum.saturating_add(self.checkpoint.stored_bytes(*value)));
        if stated > self.checkpoint.file_bytes() {
            let reason = format!("say they have {stated} bytes in a file of {}", self.checkpoint.file_bytes());
            return Err(WeightsError::invalid(path, "tensors", reason));
        }
        let mut tensors: Vec<HeadTensor> = Vec::new();
        for (name, shape) in expected {
            let value = self.value(&name)?;
            if self.matrix(&name)? != shape {
                return Err(WeightsError::Shape {
                    file: path.to_owned(),
                    tensor: name,
                    found: value.shape().unwrap_or_default().to_vec(),
                    expected: shape.map(|dim| dim as u64).to_vec(),
                });
            }
            let values = self.checkpoint.tensor(&name, value)?;
            if values.iter().any(|value| !value.is_finite()) {
                let reason = "has values that are no numbers; the checkpoint is damaged";
                return Err(WeightsError::invalid(path, format!("tensor {name:?}"), reason));
            }
            let dims = value.shape().unwrap_or_default().iter().map(|&dim| dim as usize).collect();
            tensors.push((name, dims, values.iter().flat_map(|value| value.to_le_bytes()).collect()));
        }
        write(config, &tensors, folder)?;
        Ok(tensors.iter().map(|(_, _, bytes)| bytes.len() as u64 / 4).sum())
    }
}

/// A tensor of a head that is written: name, shape, little-endian f32.
pub type HeadTensor = (String, Vec<usize>, Vec<u8>);

/// Writes a head, its description and its tensors, as [`super::HeadFiles`] reads them.
///
/// # Errors
/// [`WeightsError`] when the disk refuses, or when bytes and shape of a tensor do not fit.
pub fn write(config: &HeadConfig, tensors: &[HeadTensor], folder: &Path) -> Result<()> {
    let failed = |file: &Path, reason: std::io::Error| WeightsError::io(file, reason);
    std::fs::create_dir_all(folder).map_err(|reason| failed(folder, reason))?;
    let (weights, description) = (folder.join(WEIGHTS_FILE), folder.join(CONFIG_FILE));
    let invalid = |reason: String| WeightsError::invalid(&weights, "tensors", reason);
    let views = tensors
        .iter()
        .map(|(name, dims, bytes)| TensorView::new(Dtype::F32, dims.clone(), bytes).map(|view| (name.as_str(), view)));
    let views = views.collect::<std::result::Result<Vec<_>, _>>().map_err(|error| invalid(error.to_string()))?;
    let bytes = safetensors::serialize(views, None).map_err(|error| invalid(error.to_string()))?;
    std::fs::write(&weights, bytes).map_err(|reason| failed(&weights, reason))?;
    let json = serde_json::to_string_pretty(config).map_err(|error| invalid(error.to_string()))?;
    std::fs::write(&description, json + "\n").map_err(|reason| failed(&description, reason))
}
