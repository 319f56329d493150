//! The description of a converted head, `head.json`. Owner: whoever opened the folder. Invariant: a description that was
//! read is consistent in itself; the tensors it implies are [`HeadConfig::tensors`], no more and no less.

use serde::{Deserialize, Serialize};

/// Version of the format that is written and read.
pub const FORMAT: u32 = 1;
/// Widest layer and longest list of layers; larger numbers are mistakes.
const WIDTH_MAX: usize = 1 << 16;
const LAYERS_MAX: usize = 64;

/// A converted head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadConfig {
    /// [`FORMAT`].
    pub format: u32,
    /// Which algorithm it was trained for.
    pub family: Family,
    /// Which network it is.
    pub class: Class,
    /// Width H of the model's hidden rows.
    pub hidden_size: usize,
    /// Width E of the model's token embedding; 0 where the network reads no token.
    #[serde(default)]
    pub embedding_size: usize,
    /// How many of the highest logits the network reads; 0 for none.
    #[serde(default)]
    pub logits_size: usize,
    /// Widths of the layers: `hidden_dims` of an R2R backbone, outputs of the two linear layers of a CITER MLP.
    pub layers: Vec<usize>,
    /// Widening inside of an R2R block; 0 for CITER.
    #[serde(default)]
    pub expansion: usize,
    /// R2R: hidden row and embedding go through layer norms, and the logits through a softmax.
    #[serde(default)]
    pub normalize_input: bool,
    /// The threshold that was chosen in training, where the checkpoint has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
    /// The small model that it was trained for, as the checkpoint names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// Which algorithm a head was trained for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Score = probability that the candidate diverges.
    R2r,
    /// Score = probability that the candidate is fine.
    Citer,
}

impl Family {
    /// The family of this name.
    pub fn named(name: &str) -> Option<Family> {
        [Family::R2r, Family::Citer].into_iter().find(|family| family.name() == name)
    }

    /// As in `head.json` and in a launch file.
    pub fn name(self) -> &'static str {
        match self {
            Family::R2r => "r2r",
            Family::Citer => "citer",
        }
    }
}

/// A network, by the name of its class in the authors' code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    /// The deployed R2R network: hidden row, embedding of the candidate, highest logits.
    HiddenStatesTokenLMHeadLogitsClassifier,
    /// R2R: hidden row and embedding of the candidate.
    HiddenStatesTokenLMHeadClassifier,
    /// R2R: hidden row and highest logits.
    HiddenStatesLogitsClassifier,
    /// R2R: hidden row.
    HiddenStatesClassifier,
    /// R2R: highest logits.
    LogitsClassifier,
    /// The MLP of CITER: hidden row.
    #[serde(rename = "MLP")]
    Mlp,
}

/// The R2R classes.
pub const R2R_CLASSES: [Class; 5] = [
    Class::HiddenStatesTokenLMHeadLogitsClassifier,
    Class::HiddenStatesTokenLMHeadClassifier,
    Class::HiddenStatesLogitsClassifier,
    Class::HiddenStatesClassifier,
    Class::LogitsClassifier,
];

/// What a network reads; the parts of its first input stand in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// The hidden row after the final norm.
    pub hidden: bool,
    /// The embedding of the candidate.
    pub token: bool,
    /// The highest raw logits, descending.
    pub logits: bool,
}

impl Class {
    /// The name in the authors' code.
    pub fn name(self) -> &'static str {
        match self {
            Class::HiddenStatesTokenLMHeadLogitsClassifier => "HiddenStatesTokenLMHeadLogitsClassifier",
            Class::HiddenStatesTokenLMHeadClassifier => "HiddenStatesTokenLMHeadClassifier",
            Class::HiddenStatesLogitsClassifier => "HiddenStatesLogitsClassifier",
            Class::HiddenStatesClassifier => "HiddenStatesClassifier",
            Class::LogitsClassifier => "LogitsClassifier",
            Class::Mlp => "MLP",
        }
    }

    /// What it reads.
    pub fn inputs(self) -> Inputs {
        let (hidden, token, logits) = match self {
            Class::HiddenStatesTokenLMHeadLogitsClassifier => (true, true, true),
            Class::HiddenStatesTokenLMHeadClassifier => (true, true, false),
            Class::HiddenStatesLogitsClassifier => (true, false, true),
            Class::HiddenStatesClassifier | Class::Mlp => (true, false, false),
            Class::LogitsClassifier => (false, false, true),
        };
        Inputs { hidden, token, logits }
    }

    /// The product that joins the inputs; [`Class::LogitsClassifier`] has one input and no such product.
    pub fn join(self) -> Option<&'static str> {
        match self {
            Class::LogitsClassifier | Class::Mlp => None,
            Class::HiddenStatesClassifier => Some("hidden_states_projection"),
            _ => Some("combined_projection"),
        }
    }

    /// The layer norm of the hidden row, where inputs are normalised.
    pub fn hidden_norm(self) -> &'static str {
        if self == Class::HiddenStatesClassifier { "layer_norm" } else { "layer_norm_hidden_states" }
    }
}

impl HeadConfig {
    /// Whether the description makes sense.
    ///
    /// # Errors
    /// The key that is wrong and what it must be.
    pub fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!(
                "format is {}; this version reads {FORMAT}, convert the checkpoint again",
                self.format
            ));
        }
        let inputs = self.class.inputs();
        if (self.class == Class::Mlp) != (self.family == Family::Citer) {
            return Err(format!("class {} is not of family {}", self.class.name(), self.family.name()));
        }
        let width = |name: &str, value: usize, wanted: bool| match (wanted, value) {
            (true, 1..=WIDTH_MAX) | (false, 0) => Ok(()),
            (true, _) => Err(format!("{name} is {value}; it must be between 1 and {WIDTH_MAX}")),
            (false, _) => Err(format!("{name} is {value}; class {} has none, so it must be 0", self.class.name())),
        };
        width("hidden_size", self.hidden_size, inputs.hidden)?;
        width("embedding_size", self.embedding_size, inputs.token)?;
        width("logits_size", self.logits_size, inputs.logits)?;
        width("expansion", self.expansion, self.family == Family::R2r)?;
        if self.layers.is_empty() || self.layers.len() > LAYERS_MAX {
            return Err(format!("layers has {} entries; it must have 1 to {LAYERS_MAX}", self.layers.len()));
        }
        self.layers.iter().try_for_each(|&layer| width("layers", layer, true))?;
        self.layers
            .iter()
            .try_for_each(|&layer| width("layers times expansion", layer * self.expansion.max(1), true))?;
        if self.family == Family::Citer && (self.layers.len() != 2 || self.normalize_input) {
            return Err("a CITER MLP has two layers and no normalize_input".into());
        }
        if self.threshold.is_some_and(|threshold| !threshold.is_finite()) {
            return Err("threshold is not a number".into());
        }
        Ok(())
    }

    /// Width of the joined inputs.
    pub fn joined(&self) -> usize {
        let inputs = self.class.inputs();
        let projected = if inputs.logits { self.hidden_size } else { 0 };
        self.hidden_size + self.embedding_size + projected
    }

    /// Input and output widths of the blocks of an R2R backbone: the last one keeps its width.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let next = self.layers.iter().skip(1).chain(self.layers.last());
        self.layers.iter().copied().zip(next.copied())
    }

    /// Names and shapes (`[rows, columns]`, a vector being one row) of all tensors, as the authors' code names them; the
    /// token embedding of R2R is the model's own and not among them.
    pub fn tensors(&self) -> Vec<(String, [usize; 2])> {
        let mut list = Shapes(Vec::new());
        match self.family {
            Family::Citer => self.citer_tensors(&mut list),
            Family::R2r => self.r2r_tensors(&mut list),
        }
        list.0
    }

    fn citer_tensors(&self, list: &mut Shapes) {
        let (first, last) = self.ends();
        list.linear("mlp.0", [first, self.hidden_size]);
        list.norm("mlp.1", first);
        list.0.extend(["running_mean", "running_var"].map(|part| (format!("mlp.1.{part}"), [1, first])));
        list.linear("mlp.4", [last, first]);
        list.linear("linear", [1, last]);
    }

    fn r2r_tensors(&self, list: &mut Shapes) {
        let (inputs, hidden) = (self.class.inputs(), self.hidden_size);
        let (first, last) = self.ends();
        if inputs.logits {
            list.linear("logits_projection", [if inputs.hidden { hidden } else { first }, self.logits_size]);
        }
        if let Some(join) = self.class.join() {
            list.linear(join, [first, self.joined()]);
        }
        if self.normalize_input && inputs.hidden {
            list.norm(self.class.hidden_norm(), hidden);
        }
        if self.normalize_input && inputs.token {
            list.norm("layer_norm_token", self.embedding_size);
        }
        list.linear("backbone.input_projection", [first, first]);
        for (index, (from, to)) in self.blocks().enumerate() {
            let (name, wide) = (|part: &str| format!("backbone.blocks.{index}.{part}"), from * self.expansion);
            list.norm(&name("layer_norm"), from);
            list.linear(&name("mlp.0"), [wide, from]);
            list.linear(&name("mlp.3"), [to, wide]);
            if from != to {
                list.linear(&name("dim_change"), [to, from]);
            }
        }
        list.norm("backbone.output_layer.0", last);
        list.linear("backbone.output_layer.1", [1, last]);
    }

    /// Widths of the first and of the last layer.
    pub fn ends(&self) -> (usize, usize) {
        (self.layers.first().copied().unwrap_or_default(), self.layers.last().copied().unwrap_or_default())
    }
}

/// Tensors being listed.
struct Shapes(Vec<(String, [usize; 2])>);

impl Shapes {
    fn linear(&mut self, name: &str, [rows, cols]: [usize; 2]) {
        self.0.push((format!("{name}.weight"), [rows, cols]));
        self.0.push((format!("{name}.bias"), [1, rows]));
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.0.extend(["weight", "bias"].map(|part| (format!("{name}.{part}"), [1, width])));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(config: &HeadConfig) -> usize {
        assert_eq!(config.check(), Ok(()));
        let counted = |name: &str| !name.contains("running");
        config.tensors().iter().filter(|(name, _)| counted(name)).map(|(_, [rows, cols])| rows * cols).sum()
    }

    /// The networks of the authors have 54,677,505 and 56,302,081 (R2R, H = E = 1024 and 1536) and 4,202,497 (CITER,
    /// H = 1024) weights.
    #[test]
    fn published_sizes_have_as_many_weights() {
        let r2r = |width: usize| HeadConfig {
            format: FORMAT,
            family: Family::R2r,
            class: Class::HiddenStatesTokenLMHeadLogitsClassifier,
            hidden_size: width,
            embedding_size: width,
            logits_size: 100,
            layers: vec![1024; 6],
            expansion: 4,
            normalize_input: false,
            threshold: Some(0.4),
            model: None,
        };
        assert_eq!((weights(&r2r(1024)), weights(&r2r(1536))), (54_677_505, 56_302_081));
        let citer = HeadConfig {
            family: Family::Citer,
            class: Class::Mlp,
            embedding_size: 0,
            logits_size: 0,
            layers: vec![2048, 1024],
            expansion: 0,
            ..r2r(1024)
        };
        assert_eq!(weights(&citer), 4_202_497);
        let wrong = HeadConfig { layers: vec![2048], ..citer.clone() };
        assert!(wrong.check().is_err_and(|reason| reason.contains("two layers")));
        let wrong = HeadConfig { layers: vec![usize::MAX, 1], ..citer };
        assert!(wrong.check().is_err_and(|reason| reason.contains("layers is")));
    }
}
