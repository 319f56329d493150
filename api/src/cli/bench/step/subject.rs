//! A model on its executor, without a runtime and without a launch file, and how long its steps take. Owner: the command.
//! Invariant: sequences have pages of their own, laid out before the clock runs; the clock runs only while the executor
//! steps.

use crate::cli::{CliError, Context};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tokenrouter_core::executor::{Draw, Executor, Needs, PAGE_TOKENS, Row, RowOutput, Step};
use tokenrouter_core::ids::{RequestId, TokenId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::rng::mix;
use tokenrouter_gpu::load::{self, AnyRunner, KvMemory, LoadOptions, ModelInfo, Progress};
use tokenrouter_gpu::ops::KvFormat;
use tokenrouter_gpu::weights::{self, ModelFiles};
use tokenrouter_gpu::work::Work;
use tokenrouter_kernels::sys;

/// The model, and what is done beside timing it.
#[derive(Clone, Debug, clap::Args)]
pub struct On {
    /// The model: a .gguf file or a folder in Hugging Face layout
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Threads that compute; 0 = one for each usable core
    #[arg(long, value_name = "T", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1024))]
    threads: u32,
    /// Number format of keys and values: f16, bf16, f32 or q8
    #[arg(long, value_name = "FORMAT", default_value = "f16")]
    kv_format: KvFormat,
    /// Measure what the machine gives at most, before and after, and how near to it the model is
    #[arg(long)]
    pub roofline: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

impl On {
    /// The model, as it was named.
    pub fn model(&self) -> String {
        self.model.display().to_string()
    }

    /// The model's files, opened and checked. Options that mean nothing here are refused.
    ///
    /// # Errors
    /// [`CliError::Usage`] naming the option.
    pub fn open(&self, context: &Context) -> Result<ModelFiles, CliError> {
        let common = &context.common;
        for (option, given) in [("--config", common.config.is_some()), ("--params", !common.params.is_empty())] {
            if given {
                let text = format!("{option}: this bench has no launch file and no router; name a model with --model");
                return Err(CliError::Usage(text));
            }
        }
        if !self.model.exists() {
            let text = "does not exist; name a .gguf file or a folder in Hugging Face layout";
            return Err(wrong_model(&self.model, text));
        }
        weights::open(&self.model).map_err(|error| wrong_model(&self.model, error))
    }

    /// Loads the model with room for these sequences.
    ///
    /// # Errors
    /// [`CliError::Usage`] naming the model or the threads when it cannot be loaded like this.
    pub fn load(&self, context: &Context, (files, room): (&ModelFiles, Room)) -> Result<Subject, CliError> {
        let pages = room.tokens.div_ceil(PAGE_TOKENS as u32);
        let options = LoadOptions {
            threads: self.threads as usize,
            kv: KvMemory::Pages(room.sequences.saturating_mul(pages)),
            kv_format: self.kv_format,
            rows_max: room.sequences,
            step_tokens_max: room.step_tokens,
            ..LoadOptions::default()
        };
        let bar = context.progress.bytes("load", files.weights.total_bytes());
        let report = &mut |at: Progress| bar.set_position(at.bytes);
        let began = Instant::now();
        let model = load::load_files(files, &options, report).map_err(|error| wrong_model(&self.model, error))?;
        let executor = model.executor().map_err(|error| wrong_model(&self.model, error))?;
        bar.finish_and_clear();
        Ok(Subject {
            info: model.info().clone(),
            work: model.work().ok_or_else(|| wrong_model(&self.model, "is not on the processor"))?,
            load_s: began.elapsed().as_secs_f64(),
            threads: if self.threads == 0 { sys::default_threads() } else { self.threads as usize },
            executor,
            pages,
        })
    }
}

fn wrong_model(path: &Path, reason: impl std::fmt::Display) -> CliError {
    CliError::Usage(format!("--model {}: {reason}", path.display()))
}

/// What an executor has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Sequences side by side.
    pub sequences: u32,
    /// Tokens of each.
    pub tokens: u32,
    /// Tokens of a step.
    pub step_tokens: u32,
}

/// A model that is measured.
pub struct Subject {
    /// Facts about it.
    pub info: ModelInfo,
    /// Bytes and operations of its steps.
    pub work: Work,
    /// How long loading took, seconds.
    pub load_s: f64,
    /// Threads that compute.
    pub threads: usize,
    executor: AnyRunner,
    /// Pages of each sequence.
    pages: u32,
}

/// Whether rows draw a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawing {
    /// As a prefill chunk that is not the last.
    None,
    /// The likeliest, as greedy requests do, and beside it these signals.
    Greedy(Needs),
}

impl Subject {
    /// Seconds of one step in which each of the first `sequences` consumes `tokens` tokens behind its first `start`.
    ///
    /// # Errors
    /// The step fails, or one of its rows.
    pub fn step(&mut self, (sequences, start, tokens): (u32, u32, u32), drawing: Drawing) -> Result<f64, CliError> {
        let rows = (0..sequences).map(|sequence| self.row(sequence, (start, tokens), drawing)).collect();
        self.timed(&Step { rows })
    }

    /// Seconds for the first `tokens` of one sequence, in chunks, the last of which draws as told.
    ///
    /// # Errors
    /// As [`Subject::step`].
    pub fn prefill(&mut self, (sequence, tokens): (u32, u32), drawing: Drawing) -> Result<f64, CliError> {
        let mut seconds = 0.0;
        for (start, chunk) in chunks(tokens, self.executor.limits().step_tokens_max) {
            let drawing = if start + chunk < tokens { Drawing::None } else { drawing };
            let row = self.row(sequence, (start, chunk), drawing);
            seconds += self.timed(&Step { rows: vec![row] })?;
        }
        Ok(seconds)
    }

    fn timed(&mut self, step: &Step) -> Result<f64, CliError> {
        let began = Instant::now();
        let output = self.executor.step(step).map_err(|error| broken(error.to_string()))?;
        let seconds = began.elapsed().as_secs_f64();
        match output.rows.into_iter().find_map(|row| if let RowOutput::Failed(why) = row { Some(why) } else { None }) {
            Some(why) => Err(broken(why)),
            None => Ok(seconds),
        }
    }

    fn row(&self, sequence: u32, (start, tokens): (u32, u32), drawing: Drawing) -> Row {
        let token = |position: u32| {
            let number = mix(u64::from(sequence) << 32 | u64::from(position));
            (number % u64::from(self.info.vocab_width)) as TokenId
        };
        let draw = match drawing {
            Drawing::None => None,
            Drawing::Greedy(needs) => Some(Draw { needs, ..Draw::default() }),
        };
        Row {
            request: RequestId(u64::from(sequence)),
            start,
            tokens: (start..start + tokens).map(token).collect(),
            pages: (sequence * self.pages..(sequence + 1) * self.pages).collect(),
            draw,
            targets: None,
        }
    }
}

/// First token and number of tokens of each chunk.
pub fn chunks(tokens: u32, chunk: u32) -> impl Iterator<Item = (u32, u32)> {
    let chunk = chunk.max(1);
    (0..tokens.div_ceil(chunk)).map(move |index| (index * chunk, chunk.min(tokens - index * chunk)))
}

fn broken(reason: String) -> CliError {
    CliError::Broken(Failure::Internal(reason))
}

/// How long something took, over all repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// Half took less.
    pub median_ms: f64,
    /// The quickest.
    pub min_ms: f64,
    /// Nine of ten took less.
    pub p90_ms: f64,
}

impl Timing {
    /// Of these; zeros when there are none.
    pub fn of(mut seconds: Vec<f64>) -> Timing {
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * seconds.len().saturating_sub(1) as f64;
            1e3 * seconds.get(place.round() as usize).copied().unwrap_or_default()
        };
        Timing { median_ms: at(0.5), min_ms: at(0.0), p90_ms: at(0.9) }
    }

    /// Tokens per second at the median.
    pub fn tokens_per_s(&self, tokens: u32) -> f64 {
        f64::from(tokens) / self.median_ms.max(1e-9) * 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timings_are_values_that_occurred() {
        let timing = Timing::of((1..=11).rev().map(f64::from).collect());
        assert_eq!(timing, Timing { median_ms: 6000.0, min_ms: 1000.0, p90_ms: 10_000.0 });
        assert_eq!(timing.tokens_per_s(12), 2.0);
        assert_eq!(Timing::of(Vec::new()), Timing { median_ms: 0.0, min_ms: 0.0, p90_ms: 0.0 });
    }

    #[test]
    fn chunks_cover_a_prompt_once() {
        assert_eq!(chunks(10, 4).collect::<Vec<_>>(), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(chunks(4, 4).collect::<Vec<_>>(), [(0, 4)]);
        assert_eq!(chunks(0, 4).count(), 0);
    }
}
