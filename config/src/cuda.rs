//! CUDA devices: `device = "cuda:0"`, `[models.cuda]`, `[cuda]`. Owner: the launcher. Invariant: what only means something on
//! a CUDA device is refused for a model on the processor, and the other way round.

use crate::error::ConfigError;
use crate::fields::{Document, Fields, FromToml, Problem, Value, join};
use crate::launch::{KvFormat, LaunchFile, Model};
use crate::schema;
use serde::{Serialize, Serializer};
use std::fmt;
use toml::de::DeValue;

/// Highest number of a device.
const ORDINAL_MAX: u32 = 63;
/// Most shapes of steps that are recorded for a model.
const SHAPES_MAX: usize = 256;

/// What runs a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// The CUDA device of this number.
    Cuda(u32),
}

impl Serialize for Device {
    /// As a launch file writes it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromToml for Device {
    fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem> {
        let text = value.as_str().ok_or(Problem::Type("a string in quotes"))?;
        let unknown =
            || Problem::Value(format!("= \"{text}\" is unknown; write \"cpu\", or \"cuda:0\" for the first GPU"));
        if text == "cpu" {
            return Ok(Device::Cpu);
        }
        let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse().ok()).ok_or_else(unknown)?;
        if ordinal > ORDINAL_MAX {
            return Err(Problem::Value(format!("= \"{text}\" is out of range; give cuda:0 to cuda:{ORDINAL_MAX}")));
        }
        Ok(Device::Cuda(ordinal))
    }
}

/// `[cuda]`: the CUDA devices of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cuda {
    /// How much of a device's free memory models may take.
    pub memory_percent: u32,
}

/// `[models.cuda]`: how a model uses its CUDA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelCuda {
    /// Whether steps are recorded and played as graphs.
    pub graphs: bool,
    /// Numbers of requests that are recorded.
    pub graph_rows: Vec<u32>,
    /// Numbers of tokens of each request that are recorded.
    pub graph_tokens: Vec<u32>,
    /// Whether sums are taken in an order that does not depend on the batch.
    pub deterministic: bool,
    /// Whose work goes first where models share a device.
    pub priority: CudaPriority,
}

/// Whose work goes first where models share a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaPriority {
    /// That of others, where they have a high one.
    Normal,
    /// This model's.
    High,
}

/// Reads `[cuda]`, which is there exactly if a model is on a CUDA device.
pub(crate) fn devices(
    doc: &mut Document<'_>,
    value: Option<&Value<'_>>,
    models: &[Model],
) -> Result<Option<Cuda>, ConfigError> {
    let used = models.iter().any(|model| model.cuda.is_some());
    match value {
        None => Ok(used.then_some(Cuda { memory_percent: 90 })),
        Some(value) => {
            let fields = Fields::open(doc, ("[cuda]", "cuda"), value, schema::CUDA.names())?;
            if !used {
                let message = "no model is on a CUDA device; give one device = \"cuda:0\", or remove [cuda]";
                return Err(doc.places.error("cuda", message));
            }
            Ok(Some(Cuda { memory_percent: fields.or(doc, "memory_percent", 90)? }))
        }
    }
}

/// Reads `[models.cuda]`, which is there exactly if the model is on a CUDA device; the defaults of shapes are cut to what its
/// steps may be.
pub(crate) fn model(
    doc: &mut Document<'_>,
    (path, value): (&str, Option<&Value<'_>>),
    (device, rows_max, tokens_max): (Device, u32, u32),
) -> Result<Option<ModelCuda>, ConfigError> {
    let place = join(path, "cuda");
    let none = crate::read::absent();
    let fields = Fields::open(doc, ("[models.cuda]", &place), value.unwrap_or(&none), schema::MODEL_CUDA.names())?;
    if device == Device::Cpu {
        return match value {
            None => Ok(None),
            Some(_) => {
                let message =
                    format!("{place} is for models on a CUDA device; set device = \"cuda:0\", or remove the table");
                Err(doc.places.error(&place, message))
            }
        };
    }
    let within = |list: &[u32], most: u32| list.iter().copied().filter(|&number| number <= most).collect::<Vec<_>>();
    let priorities = [("normal", CudaPriority::Normal), ("high", CudaPriority::High)];
    Ok(Some(ModelCuda {
        graphs: fields.or(doc, "graphs", true)?,
        graph_rows: fields.or(doc, "graph_rows", within(&[1, 2, 4, 8, 16], rows_max))?,
        graph_tokens: fields.or(doc, "graph_tokens", within(&[1, 2, 4, 8], tokens_max))?,
        deterministic: fields.or(doc, "deterministic", false)?,
        priority: fields.choice(doc, "priority", &priorities)?.unwrap_or(CudaPriority::Normal),
    }))
}

/// What must hold of a model on a CUDA device.
pub(crate) fn validate(file: &LaunchFile, index: usize) -> Result<(), ConfigError> {
    let model = &file.models[index];
    let (Device::Cuda(ordinal), Some(cuda)) = (model.device, &model.cuda) else { return Ok(()) };
    let error = |field: &str, what: String| {
        let key = format!("models[{index}].{field}");
        Err(file.error_at(&key, format!("{key} {what}")))
    };
    let useless = [("threads", model.threads.is_some()), ("cores", model.cores.is_some())];
    if let Some((field, _)) = useless.iter().find(|(_, given)| *given) {
        return error(field, format!("means nothing on cuda:{ordinal}; remove it"));
    }
    if !matches!(model.kv_format, KvFormat::F16 | KvFormat::Bf16) {
        let format = model.kv_format.name();
        return error("kv_format", format!("= \"{format}\" has no CUDA kernels; give \"f16\" or \"bf16\""));
    }
    let lists = [
        ("cuda.graph_rows", &cuda.graph_rows, ("rows_max", model.rows_max)),
        ("cuda.graph_tokens", &cuda.graph_tokens, ("step_tokens_max", model.step_tokens_max)),
    ];
    for (field, list, (bound, most)) in lists {
        if list.is_empty() {
            return error(field, "is empty; list numbers, or set graphs = false".into());
        }
        if let Some(number) = list.iter().find(|&&number| number == 0 || number > most) {
            return error(field, format!("holds {number}; give numbers from 1 to {most} ({bound})"));
        }
    }
    let shapes = cuda.graph_rows.len() * cuda.graph_tokens.len();
    if shapes > SHAPES_MAX {
        return error("cuda.graph_rows", format!("and graph_tokens make {shapes} shapes; {SHAPES_MAX} are the most"));
    }
    Ok(())
}
