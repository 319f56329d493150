//! An executor without a model: a small deterministic language, a time model, and faults on order. Owner: tests and
//! scheduling benches. Invariant: it reads the whole prefix back from the pages it is given, so a wrong page table, a
//! missing or stale key, or a position off by one changes the text it writes.

use crate::executor::{
    Drawn, Entropy, Executor, ExecutorError, ExecutorLimits, Needs, PAGE_TOKENS, Row, RowOutput, Signals, Step,
    StepOutput, TokenLogprobs,
};
use crate::faults::FaultPlan;
use crate::ids::TokenId;
use crate::rng::mix;
use std::time::Duration;

/// How well a simulated model knows the language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skill {
    /// Right on easy tokens, unsure and wrong on hard ones.
    Small,
    /// Always right, sometimes unsure on hard tokens.
    Large,
}

/// The language of a simulation: the next token is a function of the prefix.
#[derive(Clone, Debug)]
pub struct Language {
    /// Tokens 0 .. vocab.
    pub vocab: u32,
    /// Chance that a token is hard.
    pub hard: f64,
    /// End-of-text and its chance per token.
    pub eos: Option<(TokenId, f64)>,
}

impl Language {
    /// What a model of this skill says after `prefix`, and how unsure it is (normalised entropy).
    pub fn next(&self, skill: Skill, prefix: &[TokenId]) -> (TokenId, f32) {
        let hash = prefix.iter().fold(0x5eed, |hash, &token| mix(hash ^ u64::from(token)));
        let chance = |salt: u64| (mix(hash ^ salt) >> 11) as f64 / (1u64 << 53) as f64;
        if let Some((eos, rate)) = self.eos
            && chance(3) < rate
        {
            return (eos, 0.001);
        }
        let truth = (mix(hash) % u64::from(self.vocab)) as TokenId;
        match (chance(1) < self.hard, skill) {
            (false, _) => (truth, 0.001),
            (true, Skill::Small) => ((truth + 1) % self.vocab, 0.5),
            (true, Skill::Large) => (truth, if chance(2) < 0.4 { 0.3 } else { 0.01 }),
        }
    }

    /// The signals behind `said` (what [`Language::next`] says) that are needed. All of them follow from how unsure the
    /// model is: the entropy over a row of `width` logits, the score of a learned head (high where a token is likely
    /// wrong), and the highest logits, which are closer together the less sure it is.
    pub fn signals(&self, needs: Needs, said: (TokenId, f32), width: u32) -> Signals {
        let (token, unsure) = said;
        let rank = |rank: u32| ((token + rank) % self.vocab, 10.0 - rank as f32 * (1.0 - unsure));
        Signals {
            entropy: needs.entropy.then(|| Entropy { nats: unsure * (width as f32).ln(), width }),
            score: needs.score.then_some(unsure),
            top: (0..u32::from(needs.top_k).min(self.vocab)).map(rank).collect(),
            hidden: if needs.hidden { vec![unsure, 1.0 - unsure] } else { Vec::new() },
        }
    }

    /// What a model that says `said` thinks of `token`: the further behind in the vocabulary, the less probable.
    pub fn logprobs(&self, said: TokenId, token: TokenId, alternatives: u8) -> TokenLogprobs {
        let at = |place: u32| -0.25 - place as f32;
        let ranked = |place: u32| ((said + place) % self.vocab, at(place));
        let place = (token % self.vocab + self.vocab - said % self.vocab) % self.vocab;
        TokenLogprobs { chosen: at(place), top: (0..u32::from(alternatives).min(self.vocab)).map(ranked).collect() }
    }

    /// The text of one model alone: the reference of every scheduling test.
    pub fn alone(&self, skill: Skill, prompt: &[TokenId], max_tokens: usize) -> Vec<TokenId> {
        let mut tokens = prompt.to_vec();
        for _ in 0..max_tokens {
            let (token, _) = self.next(skill, &tokens);
            tokens.push(token);
            if self.eos.is_some_and(|(eos, _)| eos == token) {
                break;
            }
        }
        tokens.split_off(prompt.len())
    }
}

/// How long a step takes: a constant, so much per row and so much per token.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimeModel {
    /// Every step.
    pub base: Duration,
    /// For each row.
    pub per_row: Duration,
    /// For each token.
    pub per_token: Duration,
}

impl TimeModel {
    /// Time of this step.
    pub fn latency(&self, step: &Step) -> Duration {
        self.base + self.per_row * step.rows.len() as u32 + self.per_token * step.tokens() as u32
    }
}

/// A simulated model. Build one per life of the executor; they may share a [`FaultPlan`].
#[derive(Debug)]
pub struct SimExecutor {
    limits: ExecutorLimits,
    language: Language,
    skill: Skill,
    faults: FaultPlan,
    memory: Vec<[Option<TokenId>; PAGE_TOKENS]>,
}

impl SimExecutor {
    /// An executor with empty memory.
    pub fn new(limits: ExecutorLimits, language: Language, skill: Skill, faults: FaultPlan) -> Self {
        let memory = vec![[None; PAGE_TOKENS]; limits.pages as usize];
        SimExecutor { limits, language, skill, faults, memory }
    }

    fn consume(&mut self, row: &Row) -> Result<(), ExecutorError> {
        for (position, &token) in (row.start as usize..).zip(&row.tokens) {
            let page = row.pages.get(position / PAGE_TOKENS).copied();
            let slot = page.and_then(|page| self.memory.get_mut(page as usize));
            let Some(slot) = slot else {
                return Err(ExecutorError::Step(format!("{}: no page for position {position}", row.request)));
            };
            slot[position % PAGE_TOKENS] = Some(token);
        }
        Ok(())
    }

    fn prefix(&self, row: &Row) -> Result<Vec<TokenId>, ExecutorError> {
        let end = row.start as usize + row.tokens.len();
        let read = |position: usize| self.memory[row.pages[position / PAGE_TOKENS] as usize][position % PAGE_TOKENS];
        (0..end)
            .map(read)
            .collect::<Option<_>>()
            .ok_or_else(|| ExecutorError::Step(format!("{}: a position before {end} has no key", row.request)))
    }

    fn targets(&self, row: &Row, prefix: &[TokenId]) -> Vec<TokenLogprobs> {
        let Some(targets) = &row.targets else { return Vec::new() };
        let answer = |(before, &token): (usize, &TokenId)| {
            let (said, _) = self.language.next(self.skill, &prefix[..before]);
            self.language.logprobs(said, token, targets.alternatives)
        };
        (row.start as usize + targets.first as usize + 1..).zip(&targets.tokens).map(answer).collect()
    }

    fn answer(&self, row: &Row) -> Result<RowOutput, ExecutorError> {
        let prefix = if row.draw.is_some() || row.targets.is_some() { self.prefix(row)? } else { Vec::new() };
        let targets = self.targets(row, &prefix);
        let Some(draw) = &row.draw else { return Ok(RowOutput::Fed(targets)) };
        let said = self.language.next(self.skill, &prefix);
        let signals = self.language.signals(draw.needs, said, self.limits.vocab_width);
        let mut token = said.0;
        let may =
            |token: TokenId| !draw.banned.contains(&token) && draw.mask.as_ref().is_none_or(|mask| mask.allows(token));
        let Some(next) = (0..self.language.vocab).map(|on| (token + on) % self.language.vocab).find(|&id| may(id))
        else {
            return Ok(RowOutput::Failed("nothing may be said".into()));
        };
        token = next;
        let logprobs = draw.logprobs.map(|alternatives| self.language.logprobs(said.0, token, alternatives));
        Ok(RowOutput::Drawn(Drawn { token, signals, logprobs, targets }))
    }
}

impl Executor for SimExecutor {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        // How long a step takes is a matter of the time model, also when it is slow or stuck on order.
        if let Some(answer) = self.faults.next().and_then(|fault| fault.answer(step)) {
            return answer;
        }
        if step.rows.len() > self.limits.rows_max as usize || step.tokens() > self.limits.step_tokens_max as usize {
            return Err(ExecutorError::Step(format!("{} rows, {} tokens: too many", step.rows.len(), step.tokens())));
        }
        for row in &step.rows {
            self.consume(row)?;
        }
        let rows = step.rows.iter().map(|row| self.answer(row)).collect::<Result<_, _>>()?;
        Ok(StepOutput { rows })
    }
}
