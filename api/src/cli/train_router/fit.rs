//! The training loop: class-weighted cross-entropy, AdamW, mini-batches, early stopping. Owner: the command. Invariant:
//! a fit depends on the rows, the description and the plan alone; the same three give the same bits on one machine.

use super::data::{Batches, Split};
use super::network::Trainee;
use crate::cli::CliError;
use candle_core::{Result, Tensor};
use candle_nn::ops::sigmoid;
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use tokenrouter_core::job::Failure;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_gpu::heads::{Family, HeadConfig};

/// Rows that are scored at once.
const SCORED_ROWS: usize = 4096;

/// How to train.
#[derive(Clone, Debug, clap::Args)]
pub struct Plan {
    /// Passes over the training rows at most
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub epochs: u32,
    /// Stop after this many passes without a smaller loss on validation
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub patience: u32,
    /// Rows of a step
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..))]
    pub batch: u32,
    /// Learning rate at the start; it falls to nothing on half a cosine over all passes
    #[arg(long, value_name = "RATE", default_value_t = 1e-3)]
    pub rate: f64,
    /// Weight decay
    #[arg(long, value_name = "DECAY", default_value_t = 5e-4)]
    pub weight_decay: f64,
    /// Weight of divergent rows, in units of (other rows / divergent rows)
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub recall_factor: f64,
    /// The same seed and shards give the same head
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl Plan {
    /// Whether its numbers make sense.
    ///
    /// # Errors
    /// [`CliError::Usage`] naming the option.
    pub fn check(&self) -> std::result::Result<(), CliError> {
        let wrong = |option: &str, value: f64, must: &str| {
            Err(CliError::Usage(format!("{option} is {value}; it must be a number {must}")))
        };
        let finite = f64::is_finite;
        match self {
            Plan { rate, .. } if !(finite(*rate) && *rate > 0.0) => wrong("--rate", *rate, "above 0"),
            Plan { weight_decay: decay, .. } if !(finite(*decay) && *decay >= 0.0) => {
                wrong("--weight-decay", *decay, "of 0 or more")
            }
            Plan { recall_factor: factor, .. } if !(finite(*factor) && *factor > 0.0) => {
                wrong("--recall-factor", *factor, "above 0")
            }
            _ => Ok(()),
        }
    }
}

/// A trained head.
pub struct Fit {
    /// Its tensors.
    pub tensors: BTreeMap<String, Tensor>,
    /// Score and label of every validation row.
    pub scored: Vec<(f32, bool)>,
    /// Loss on validation.
    pub loss: f64,
    /// The pass it is from, counted from 1.
    pub best: u32,
    /// Passes that were made.
    pub epochs: u32,
}

/// Mean of the class-weighted binary cross-entropy with logits, `w y softplus(-z) + (1 - y) softplus(z)`; y = 1 is the
/// class of weight w.
///
/// # Errors
/// Shapes that differ.
pub fn loss(logits: &Tensor, targets: &Tensor, positive_weight: f64) -> Result<Tensor> {
    let positive = (targets * softplus(&logits.neg()?)?)?;
    let negative = ((1.0 - targets)? * softplus(logits)?)?;
    ((positive * positive_weight)? + negative)?.mean_all()
}

/// `ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)`.
fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

/// Trains a head on one side of the split and keeps it as it was when the loss on the other side was least.
///
/// # Errors
/// [`CliError::Usage`] when the loss is no number, [`CliError::Broken`] when a step fails.
pub fn fit(
    config: &HeadConfig,
    batches: &Batches<'_>,
    (split, plan): (&Split, &Plan),
    bar: &ProgressBar,
) -> std::result::Result<Fit, CliError> {
    let broken = |error: candle_core::Error| CliError::Broken(Failure::Internal(format!("training: {error}")));
    let mut trainer = Trainer::new(config, batches, (split, plan)).map_err(broken)?;
    let mut best: Option<Fit> = None;
    for epoch in 1..=plan.epochs {
        trainer.epoch(epoch).map_err(broken)?;
        let (loss, scored) = trainer.validate().map_err(broken)?;
        bar.inc(1);
        bar.set_message(format!("train, loss {loss:.4}"));
        if !loss.is_finite() {
            let rate = plan.rate;
            return Err(CliError::Usage(format!(
                "the loss is {loss} after pass {epoch}; lower --rate, which is {rate}"
            )));
        }
        match &mut best {
            Some(best) if loss >= best.loss => {
                best.epochs = epoch;
                if epoch - best.best >= plan.patience {
                    break;
                }
            }
            _ => {
                let tensors = trainer.head.snapshot().map_err(broken)?;
                best = Some(Fit { tensors, scored, loss, best: epoch, epochs: epoch });
            }
        }
    }
    best.ok_or_else(|| CliError::Usage("--epochs must be 1 or more".into()))
}

struct Trainer<'a> {
    head: Trainee,
    batches: &'a Batches<'a>,
    split: &'a Split,
    plan: &'a Plan,
    optimizer: AdamW,
    positive_weight: f64,
    steps: f64,
}

impl<'a> Trainer<'a> {
    fn new(config: &HeadConfig, batches: &'a Batches<'a>, (split, plan): (&'a Split, &'a Plan)) -> Result<Trainer<'a>> {
        let head = Trainee::new(config.clone(), plan.seed)?;
        let params = ParamsAdamW { lr: plan.rate, weight_decay: plan.weight_decay, ..ParamsAdamW::default() };
        let optimizer = AdamW::new(head.trained(), params)?;
        let positive = batches.data.divergent_of(&split.training) as f64;
        let positive_weight = plan.recall_factor * (split.training.len() as f64 - positive) / positive.max(1.0);
        Ok(Trainer { head, batches, split, plan, optimizer, positive_weight, steps: 0.0 })
    }

    /// One pass over the training rows in an order of its own.
    fn epoch(&mut self, epoch: u32) -> Result<()> {
        let key = rng::mix(self.plan.seed ^ rng::mix(u64::from(epoch)));
        let mut order = self.split.training.clone();
        order.sort_by_cached_key(|&row| (rng::bits(key, row as u32, Stream::Owner), row));
        let size = self.plan.batch as usize;
        let total = order.len().div_ceil(size) as f64 * f64::from(self.plan.epochs);
        for rows in order.chunks(size) {
            let fallen = 0.5 * (1.0 + (std::f64::consts::PI * self.steps / total).cos());
            self.optimizer.set_learning_rate(self.plan.rate * fallen);
            let logits = self.divergence(self.head.train(&self.batches.inputs(rows)?)?)?;
            let loss = loss(&logits, &self.batches.targets(rows)?, self.positive_weight)?;
            self.optimizer.backward_step(&loss)?;
            self.steps += 1.0;
        }
        Ok(())
    }

    /// Loss on validation, with score and label of every row.
    fn validate(&self) -> Result<(f64, Vec<(f32, bool)>)> {
        let (mut sum, mut scored) = (0.0, Vec::with_capacity(self.split.validation.len()));
        for rows in self.split.validation.chunks(SCORED_ROWS) {
            let logits = self.head.evaluate(&self.batches.inputs(rows)?)?;
            let scores = sigmoid(&logits)?.to_vec1::<f32>()?;
            scored.extend(scores.into_iter().zip(rows.iter().map(|&row| self.batches.data.divergent[row])));
            let logits = self.divergence(logits)?;
            let loss = loss(&logits, &self.batches.targets(rows)?, self.positive_weight)?;
            sum += f64::from(loss.to_scalar::<f32>()?) * rows.len() as f64;
        }
        Ok((sum / scored.len().max(1) as f64, scored))
    }

    /// Logits of divergence: those of R2R as they are; CITER's are of the opposite.
    fn divergence(&self, logits: Tensor) -> Result<Tensor> {
        match self.head.config().family {
            Family::R2r => Ok(logits),
            Family::Citer => logits.neg(),
        }
    }
}
