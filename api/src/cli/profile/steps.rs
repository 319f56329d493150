//! How long steps take on the real executors, alone and while the other models step without a pause. Owner: the command.
//! Invariant: shapes are interleaved, alone and beside in turn, so a slow spell of the machine falls on all of them; a
//! point is the mean, for it is the mean that decides a throughput.

use crate::cli::CliError;
use crate::launch::{LaunchError, Loaded};
use indicatif::ProgressBar;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, PoisonError, RwLock};
use std::thread;
use std::time::Instant;
use tokenrouter_core::executor::{Draw, Executor, ExecutorLimits, PAGE_TOKENS, Row, RowOutput, Step};
use tokenrouter_core::ids::{ModelIdx, RequestId, TokenId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::rng::mix;
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::theory::latency::Point;

/// Rows of the steps that others make meanwhile, one after another; each consumes what is typical for that model.
const COMPANY: [u32; 3] = [1, 2, 4];

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Largest number of rows.
    pub rows_max: u32,
    /// Tokens that every row has behind it.
    pub context: u32,
    /// Steps of every shape.
    pub repeat: u32,
}

/// (rows, tokens of each row) of the steps to measure for one model.
pub type Shapes = Vec<(u32, u32)>;

/// Rows 1, 2, 4, ... and the largest; for each the powers of 2 up to the first from `length` on.
pub fn shapes(limits: &ExecutorLimits, effort: Effort, length: u32) -> Shapes {
    let slot = slot_pages(effort.context, LEVEL_MAX);
    let rows_max = effort.rows_max.min(limits.rows_max).min(limits.pages / slot.max(1)).max(1);
    let mut rows: Vec<u32> = powers().take_while(|&rows| rows < rows_max).collect();
    rows.push(rows_max);
    let longest = if length > 1 { (2 * length).min(LEVEL_MAX) } else { 1 };
    let levels: Vec<u32> = powers().take_while(|&tokens| tokens <= longest).collect();
    let fits = |&(rows, tokens): &(u32, u32)| rows * tokens <= limits.step_tokens_max;
    rows.iter().flat_map(|&rows| levels.iter().map(move |&tokens| (rows, tokens))).filter(fits).collect()
}

fn powers() -> impl Iterator<Item = u32> {
    (0..31).map(|power| 1 << power)
}

/// Longest extend that is measured.
const LEVEL_MAX: u32 = 64;

fn slot_pages(context: u32, tokens: u32) -> u32 {
    (context + tokens).div_ceil(PAGE_TOKENS as u32)
}

/// Points of one model: with nothing else at work, and while all others step (empty for a single model).
pub fn points(
    loaded: &Loaded,
    (index, shapes): (usize, &Shapes),
    (effort, sampling, bar, typical): (Effort, &SamplingParams, &ProgressBar, &[u32]),
) -> Result<[Vec<Point>; 2], CliError> {
    let others: Vec<usize> = (0..loaded.members.len()).filter(|&other| other != index).collect();
    let (stop, ready, gate) = (AtomicBool::new(false), Barrier::new(others.len() + 1), RwLock::new(()));
    let mut subject = Subject::new(loaded, index, (effort, sampling))?;
    thread::scope(|scope| {
        let company = |other: usize| {
            let subject = Subject::new(loaded, other, (effort, sampling));
            ready.wait();
            let mut subject = subject?;
            let rows: Vec<u32> = COMPANY.into_iter().filter(|&rows| rows <= subject.rows_max()).collect();
            for rows in rows.into_iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let _pass = gate.read().unwrap_or_else(PoisonError::into_inner);
                let tokens = typical[other].min(LEVEL_MAX).min(subject.limits.step_tokens_max / rows).max(1);
                subject.time((rows, tokens))?;
            }
            Ok::<(), CliError>(())
        };
        let threads: Vec<_> = others.iter().map(|&other| scope.spawn(move || company(other))).collect();
        ready.wait();
        let points = subject.rounds(shapes, (effort.repeat, bar), (&gate, !others.is_empty()));
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap_or_else(|_| Err(broken("a thread that made steps panicked")))?;
        }
        points
    })
}

fn broken(reason: impl Into<String>) -> CliError {
    CliError::Broken(Failure::Internal(reason.into()))
}

/// An executor whose slots hold `context` tokens each.
struct Subject {
    executor: Box<dyn Executor>,
    limits: ExecutorLimits,
    draw: Draw,
    context: u32,
    vocab: u32,
    /// Slots that are filled.
    filled: u32,
}

impl Subject {
    fn new(loaded: &Loaded, index: usize, (effort, sampling): (Effort, &SamplingParams)) -> Result<Subject, CliError> {
        let member = &loaded.members[index];
        let failed = |reason| LaunchError::Load { model: member.name.clone(), reason: Box::new(reason) };
        let executor = Box::new(member.model.executor().map_err(failed)?);
        let limits = executor.limits();
        let context = effort.context.min(limits.context_len.saturating_sub(LEVEL_MAX)).max(1);
        let draw = Draw {
            params: Arc::new(sampling.clone()),
            needs: loaded.algorithm.needs(ModelIdx(index as u8)),
            ..Draw::default()
        };
        Ok(Subject { executor, limits, draw, context, vocab: loaded.codec().vocab_size().max(1), filled: 0 })
    }

    fn rows_max(&self) -> u32 {
        (self.limits.pages / slot_pages(self.context, LEVEL_MAX)).min(self.limits.rows_max).max(1)
    }

    fn row(&self, slot: u32, (start, tokens): (u32, u32), draw: Option<Draw>) -> Row {
        let each = slot_pages(self.context, LEVEL_MAX);
        let token = |at: u32| (mix(u64::from(slot) << 32 | u64::from(start + at)) % u64::from(self.vocab)) as TokenId;
        let pages = (start + tokens).div_ceil(PAGE_TOKENS as u32);
        Row {
            request: RequestId(u64::from(slot)),
            start,
            tokens: (0..tokens).map(token).collect(),
            pages: (slot * each..slot * each + pages).collect(),
            draw,
            targets: None,
        }
    }

    /// Seconds of one step.
    fn time(&mut self, (rows, tokens): (u32, u32)) -> Result<f64, CliError> {
        while self.filled < rows {
            let mut start = 0;
            while start < self.context {
                let len = (self.context - start).min(self.limits.step_tokens_max);
                self.step(Step { rows: vec![self.row(self.filled, (start, len), None)] })?;
                start += len;
            }
            self.filled += 1;
        }
        let row = |slot: u32| self.row(slot, (self.context, tokens), Some(self.draw.clone()));
        self.step(Step { rows: (0..rows).map(row).collect() })
    }

    fn step(&mut self, step: Step) -> Result<f64, CliError> {
        let began = Instant::now();
        let output = self.executor.step(&step).map_err(|error| broken(error.to_string()))?;
        let seconds = began.elapsed().as_secs_f64();
        match output.rows.iter().find_map(|row| if let RowOutput::Failed(reason) = row { Some(reason) } else { None }) {
            Some(reason) => Err(broken(reason.clone())),
            None => Ok(seconds),
        }
    }

    /// So many rounds: every shape once while nobody else may step, then once beside the others. A first round is not
    /// counted, nor is the first step after the others were let go.
    fn rounds(
        &mut self,
        shapes: &Shapes,
        (repeat, bar): (u32, &ProgressBar),
        (gate, others): (&RwLock<()>, bool),
    ) -> Result<[Vec<Point>; 2], CliError> {
        let mut alone = vec![Vec::new(); shapes.len()];
        let mut beside = alone.clone();
        for round in 0..=repeat {
            {
                let _closed = gate.write().unwrap_or_else(PoisonError::into_inner);
                self.round(shapes, &mut alone)?;
            }
            bar.inc(if round > 0 { shapes.len() as u64 } else { 0 });
            if others {
                self.time((1, 1))?;
                self.round(shapes, &mut beside)?;
                bar.inc(if round > 0 { shapes.len() as u64 } else { 0 });
            }
        }
        let points = |seconds: Vec<Vec<f64>>| {
            let counted = shapes.iter().zip(seconds).filter(|(_, seconds)| !seconds.is_empty());
            counted.map(|(&shape, mut seconds)| point(shape, seconds.split_off(1))).collect()
        };
        Ok([points(alone), points(beside)])
    }

    fn round(&mut self, shapes: &Shapes, seconds: &mut [Vec<f64>]) -> Result<(), CliError> {
        for (&shape, seconds) in shapes.iter().zip(seconds) {
            seconds.push(self.time(shape)?);
        }
        Ok(())
    }
}

/// Mean and spread.
fn point((rows, tokens): (u32, u32), mut seconds: Vec<f64>) -> Point {
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share).round() as usize];
    let mean = seconds.iter().sum::<f64>() / seconds.len() as f64;
    Point { rows, tokens, seconds: mean, spread: 0.5 * (at(0.9) - at(0.1)) / mean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_stay_within_the_limits() {
        let limits = |pages, rows_max| ExecutorLimits {
            pages,
            rows_max,
            step_tokens_max: 128,
            context_len: 4096,
            vocab_width: 10,
        };
        let effort = |rows_max| Effort { rows_max, context: 128, repeat: 1 };
        let found = |pages, rows, length| shapes(&limits(pages, 64), effort(rows), length);
        assert_eq!(found(1000, 6, 1), [(1, 1), (2, 1), (4, 1), (6, 1)]);
        assert_eq!(found(1000, 1, 2), [(1, 1), (1, 2), (1, 4)]);
        assert_eq!(found(1000, 2, 2), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]);
        assert_eq!(found(1000, 1, 128).last(), Some(&(1, 64)));
        assert_eq!(found(1000, 16, 8).last(), Some(&(16, 8)), "16 x 16 is more than a step holds");
        assert_eq!(found(30, 16, 1), [(1, 1), (2, 1)], "pages for two sequences");
    }

    #[test]
    fn a_point_is_the_mean() {
        let made = point((2, 1), (1..=10).rev().chain([56]).map(f64::from).collect());
        let mean = 111.0 / 11.0;
        assert_eq!(made, Point { rows: 2, tokens: 1, seconds: mean, spread: 4.0 / mean });
    }
}
