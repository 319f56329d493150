//! Draws as a CUDA device takes them, and what it drew. Owner: the device. Invariant: the edits of a draw, applied one
//! after the other, are what the sampler of the host does to a row before the mask; they are in the order of ids, those of
//! one id in the order in which they apply, so that a device can edit ids side by side.

use crate::sampling::{self, SampleError, is_greedy, is_plain_greedy, is_usable};
use tokenrouter_core::executor::Draw;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_kernels::cuda::{self, Answer, Edit, NONE, StepInput, draw};

/// The draw of padding.
pub const PADDING: cuda::Draw = cuda::Draw {
    flags: 0,
    temperature: 0.0,
    log_min_p: 0.0,
    top_p: 1.0,
    top_k: 0,
    edit_first: 0,
    edit_count: 0,
    mask_first: NONE,
    unit: 0.0,
};

/// Changes nothing.
const NO_EDIT: Edit = Edit { id: 0, bias: 0.0, repetition: 1.0, minus: 0.0, ban: 0 };

/// Adds the draw of the token at `position` to a step, with its edits and its mask; rows have `vocab` logits.
pub fn push((wanted, position): (&Draw, u32), vocab: u32, input: &mut StepInput) {
    let params = &*wanted.params;
    let (edit_first, mask_first) = (input.edits.len(), input.masks.len());
    push_edits(wanted, vocab, &mut input.edits);
    if let Some(mask) = &wanted.mask {
        let words = vocab.div_ceil(32) as usize;
        input.masks.extend(mask.words().iter().copied().chain(std::iter::repeat(0)).take(words));
    }
    let mut flags = 0;
    if !is_plain_greedy(wanted) {
        flags |= draw::ADJUSTED;
        // What cannot divide logits is refused afterwards, so that faults come in the order of the host's.
        if is_greedy(params.temperature) || !is_usable(params.temperature) {
            flags |= draw::GREEDY;
        }
    }
    input.draws.push(cuda::Draw {
        flags,
        temperature: params.temperature,
        log_min_p: sampling::log_weight_min(params.min_p),
        top_p: params.top_p,
        top_k: params.top_k,
        edit_first: edit_first as u32,
        edit_count: (input.edits.len() - edit_first) as u32,
        mask_first: if wanted.mask.is_some() { mask_first as u32 } else { NONE },
        unit: rng::unit(params.seed, position, Stream::Token),
    });
}

fn push_edits(wanted: &Draw, vocab: u32, edits: &mut Vec<Edit>) {
    let (params, first) = (&*wanted.params, edits.len());
    edits.extend(params.logit_bias.iter().map(|&(id, bias)| Edit { id, bias, ..NO_EDIT }));
    if let (true, Some(history)) = (params.reads_history(), wanted.history.as_deref()) {
        let penalties = history.iter().map(|(id, seen)| {
            let repeated = seen.in_prompt || seen.in_output > 0;
            let minus = params.frequency_penalty * seen.in_output as f32 + params.presence_penalty;
            Edit {
                id,
                repetition: if repeated { params.repetition_penalty } else { 1.0 },
                minus: if seen.in_output > 0 { minus } else { 0.0 },
                ..NO_EDIT
            }
        });
        edits.extend(penalties.filter(|edit| edit.repetition != 1.0 || edit.minus != 0.0));
    }
    edits.extend(wanted.banned.iter().map(|&id| Edit { id, ban: 1, ..NO_EDIT }));
    let mut next = first;
    for index in first..edits.len() {
        if edits[index].id < vocab {
            edits[next] = edits[index];
            next += 1;
        }
    }
    edits.truncate(next);
    edits[first..].sort_by_key(|edit| edit.id);
}

/// The token that was drawn at this temperature and its raw logit, of a row whose logits have no fault.
///
/// # Errors
/// As [`Sampler::draw`](sampling::Sampler::draw).
pub fn drawn(temperature: f32, answer: &Answer) -> Result<(TokenId, f32), SampleError> {
    match answer.draw_fault {
        0 if is_greedy(temperature) || is_usable(temperature) => Ok((answer.token, answer.token_logit)),
        0 => Err(SampleError::Temperature(temperature)),
        1 => Err(SampleError::NothingLeft),
        _ => Err(SampleError::NotFinite(answer.draw_value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokenrouter_core::constraint::Mask;
    use tokenrouter_core::sampling::{SamplingParams, TokenCounts};

    /// Pseudo-random numbers below a bound.
    struct Random(u32);

    impl Random {
        fn below(&mut self, bound: u32) -> u32 {
            self.0 += 1;
            (rng::unit(5, self.0, Stream::Owner) * f64::from(bound)) as u32
        }

        fn value(&mut self) -> f32 {
            match self.below(12) {
                0 => 0.0,
                1 => -0.0,
                2 => f32::NEG_INFINITY,
                3 => f32::INFINITY,
                4 => f32::NAN,
                _ => self.below(2000) as f32 / 100.0 - 10.0,
            }
        }

        fn ids(&mut self, bound: u32) -> Vec<u32> {
            (0..self.below(30)).map(|_| self.below(bound)).collect()
        }

        fn draw(&mut self, vocab: u32) -> Draw {
            let bias: Vec<_> = self.ids(vocab + 5).into_iter().map(|id| (id, self.value())).collect();
            let tokens = self.ids(vocab + 5);
            let prompt = self.below(10) as usize;
            Draw {
                params: Arc::new(SamplingParams {
                    temperature: [0.0, 1.0, -1.0, f32::NAN][self.below(4) as usize],
                    repetition_penalty: [1.0, 1.3, 0.5, 0.0][self.below(4) as usize],
                    presence_penalty: [0.0, 0.7][self.below(2) as usize],
                    frequency_penalty: [0.0, 0.1, -0.3][self.below(3) as usize],
                    logit_bias: bias,
                    ..SamplingParams::default()
                }),
                history: Some(Arc::new(TokenCounts::of(&tokens, prompt))),
                banned: self.ids(vocab + 5).into(),
                mask: (self.below(2) == 0).then(|| Mask::of(&self.ids(vocab + 40))),
                ..Draw::default()
            }
        }
    }

    /// What `Edit` is documented to do.
    fn apply(logit: &mut f32, edit: &Edit) {
        *logit += edit.bias;
        if *logit != f32::NEG_INFINITY {
            if edit.repetition != 1.0 {
                *logit = if *logit > 0.0 { *logit / edit.repetition } else { *logit * edit.repetition };
            }
            *logit -= edit.minus;
        }
        if edit.ban != 0 {
            *logit = f32::NEG_INFINITY;
        }
    }

    #[test]
    fn edits_and_mask_do_what_the_sampler_does() {
        let (mut random, mut input) = (Random(0), StepInput::default());
        for round in 0..3000 {
            let vocab = 1 + random.below(70);
            let wanted = random.draw(vocab);
            push((&wanted, 3), vocab, &mut input);
            let staged = input.draws[round];
            let raw: Vec<f32> = (0..vocab).map(|_| random.value()).collect();
            let (mut expected, mut found) = (raw.clone(), raw);
            sampling::adjust(&mut expected, &wanted);
            let edits = &input.edits[staged.edit_first as usize..][..staged.edit_count as usize];
            assert!(edits.is_sorted_by_key(|edit| edit.id));
            edits.iter().for_each(|edit| apply(&mut found[edit.id as usize], edit));
            if staged.mask_first != NONE {
                let words = &input.masks[staged.mask_first as usize..][..vocab.div_ceil(32) as usize];
                let masked = found.iter_mut().enumerate().filter(|(id, _)| words[id / 32] >> (id % 32) & 1 == 0);
                masked.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
            let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            assert!(expected.iter().zip(&found).all(same), "{wanted:?}\n{expected:?}\n{found:?}");
        }
    }

    #[test]
    fn faults_come_in_the_order_of_the_sampler() {
        let found = Answer { token: 7, token_logit: 2.5, ..Answer::default() };
        let empty = Answer { draw_fault: 1, ..Answer::default() };
        let infinite = Answer { draw_fault: 2, draw_value: f32::INFINITY, ..Answer::default() };
        for temperature in [0.0, 1e-6, 0.5] {
            assert_eq!(drawn(temperature, &found), Ok((7, 2.5)));
        }
        assert_eq!(drawn(-1.0, &found), Err(SampleError::Temperature(-1.0)));
        assert_eq!(drawn(-1.0, &empty), Err(SampleError::NothingLeft));
        assert_eq!(drawn(0.5, &infinite), Err(SampleError::NotFinite(f32::INFINITY)));
    }

    #[test]
    fn a_plain_greedy_draw_is_no_work_and_a_bad_temperature_is_greedy_for_the_device() {
        let mut input = StepInput::default();
        for temperature in [0.0, f32::INFINITY, 0.8] {
            let params = Arc::new(SamplingParams { temperature, ..SamplingParams::default() });
            push((&Draw { params, ..Draw::default() }, 0), 100, &mut input);
        }
        let flags: Vec<u32> = input.draws.iter().map(|draw| draw.flags).collect();
        assert_eq!(flags, [0, draw::ADJUSTED | draw::GREEDY, draw::ADJUSTED]);
    }
}
