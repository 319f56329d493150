//! What a step says, from the device's records to what the runner reads. Owner: the device. Invariant: only outputs that
//! are no padding have an answer.

use super::Cuda;
use super::draws;
use super::staging::Staged;
use crate::ops::{Fault, HeadOutput, Reduced};
use tokenrouter_core::executor::ExecutorError;
use tokenrouter_core::ids::TokenId;
use tokenrouter_kernels::cuda::{AnswerMemory, Answers, Candidate, CudaError, Stream};
use tokenrouter_kernels::head::cuda::HeadScratch;

/// What draws tokens and keeps answers on a device.
#[derive(Debug)]
pub struct CudaAnswers {
    pub(super) memory: AnswerMemory,
    pub(super) scratch: HeadScratch,
}

impl CudaAnswers {
    pub(super) fn new(stream: &Stream, rows_max: usize, vocab: usize) -> Result<Self, CudaError> {
        Ok(CudaAnswers {
            memory: AnswerMemory::new(stream, rows_max)?,
            scratch: HeadScratch::new(stream.gpu(), rows_max, vocab)?,
        })
    }
}

/// What a step ends with that failed in this way. What was given before may still be on its way; the next step must not
/// overtake it.
pub(super) fn failed(stream: &Stream, error: CudaError) -> ExecutorError {
    let error = match stream.settle() {
        Err(lost) if lost.is_lost() && !error.is_lost() => lost,
        Ok(()) | Err(_) => error,
    };
    if error.is_lost() { ExecutorError::Lost(error.to_string()) } else { ExecutorError::Step(error.to_string()) }
}

/// Reads the answers of a finished step.
pub(super) fn decode(staged: &Staged, out: &mut HeadOutput<Cuda>) {
    let HeadOutput { reduced, drawn, scores, column, answers, .. } = out;
    let host = answers.memory.host();
    reduced.clear();
    drawn.clear();
    scores.clear();
    column.clear();
    for output in 0..staged.asked() {
        let answer = host.answer(output);
        reduced.push(match answer.fault {
            0 => Ok(found(&host, output)),
            1 => Err(Fault::NotFinite),
            _ => Err(Fault::Empty),
        });
        scores.push(answer.score);
        column.push(answer.column);
    }
    for (output, &temperature) in staged.temperatures.iter().enumerate() {
        drawn.push(draws::drawn(temperature, &host.answer(output)));
    }
}

fn found(host: &Answers<'_>, output: usize) -> Reduced {
    let answer = host.answer(output);
    let pair = |candidate: Candidate| -> (TokenId, f32) { (candidate.id, candidate.logit) };
    Reduced {
        argmax: answer.argmax,
        highest: answer.highest,
        log_sum_exp: answer.log_sum_exp,
        entropy: answer.entropy,
        target: answer.target,
        top: host.tops(output).map(pair).collect(),
        real_top: host.real_tops(output).map(pair).collect(),
    }
}
