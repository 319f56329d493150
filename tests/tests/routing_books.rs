//! The books of a request that walks between three models: what each model knows and what it holds keys for. The state
//! machine is driven by hand, without runtime, and kept beside books of plain numbers; the text must be that of the
//! single loop of the World, and half of the requests are told the log-probabilities of their prompts, whatever was
//! computed again. Owner: the state machine. Invariant: `kv <= known <= len` at every model, after every move.

use proptest::prelude::*;
use std::sync::Arc;
use tokenrouter_core::executor::{Drawn, Executor, ExecutorLimits, Needs, PAGE_TOKENS, RowOutput, Step};
use tokenrouter_core::faults::FaultPlan;
use tokenrouter_core::ids::{ModelIdx, RequestId, Time};
use tokenrouter_core::job::{Target, TokenReport};
use tokenrouter_core::kv::KvPool;
use tokenrouter_core::peer::PeerReq;
use tokenrouter_core::request::{Pending, Queued, RequestSpec, Running, Seat, Settled};
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::{Algorithm, Decision, Prior, Route, StepView};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::sim::{Language, SimExecutor, Skill};
use tokenrouter_tests::world::reference::{Told, tell};

const MODELS: usize = 3;
const SKILLS: [Skill; MODELS] = [Skill::Small, Skill::Large, Skill::Small];
const LIMITS: ExecutorLimits =
    ExecutorLimits { pages: 64, rows_max: 4, step_tokens_max: 256, context_len: 256, vocab_width: 1000 };
const NOW: Time = Time(0);

/// Any model, with or without the candidate, by seed, position and model. At each position one model alone may leave
/// without its token, so that two hops in a row cannot be empty.
#[derive(Clone, Debug)]
struct Walk;

impl Algorithm for Walk {
    fn needs(&self, _: ModelIdx) -> Needs {
        Needs::default()
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        ModelIdx((mix(seed) % MODELS as u64) as u8)
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![1.0 / 3.0; MODELS]; MODELS], c: vec![vec![1.0; MODELS]; MODELS] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for Walk {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        let place = mix(step.seed ^ u64::from(step.position()));
        let draw = mix(place ^ (step.model.index() as u64 + 1));
        let to = ModelIdx((draw % MODELS as u64) as u8);
        let may_drop = place % MODELS as u64 == step.model.index() as u64;
        Ok(Decision { to, keep: to == step.model || !may_drop || draw & 0x100 == 0 })
    }
}

/// Where a request is at one model.
#[derive(Debug)]
enum Place {
    Unseen,
    Queued(Queued),
    Pending(Pending),
}

/// One request: its states, and the books kept beside them.
struct Walker {
    spec: Arc<RequestSpec>,
    places: [Place; MODELS],
    active: usize,
    tokens: Vec<u32>,
    known: [u32; MODELS],
    kv: [u32; MODELS],
    told: Told,
    prompt: Option<Vec<TokenReport>>,
    ended: bool,
}

/// The devices and their memory.
struct Devices {
    pools: [KvPool; MODELS],
    executors: [SimExecutor; MODELS],
}

impl Devices {
    fn new(language: &Language) -> Self {
        let executor = |model: usize| SimExecutor::new(LIMITS, language.clone(), SKILLS[model], FaultPlan::default());
        Devices { pools: std::array::from_fn(|_| KvPool::new(LIMITS.pages)), executors: std::array::from_fn(executor) }
    }

    fn seat(&self, me: usize) -> Seat<'_> {
        Seat { me: ModelIdx(me as u8), pool: &self.pools[me], route: Walk.start(), constraint: None, now: NOW }
    }
}

impl Walker {
    fn new(number: u64, (seed, prompt, max): (u64, u32, u32), eos: Vec<u32>, devices: &Devices) -> Self {
        let home = Walk.entry(seed);
        let active = home.index();
        let tokens: Vec<u32> = (0..prompt).map(|at| (mix((number / 2) ^ u64::from(at)) % 30) as u32).collect();
        let spec = Arc::new(RequestSpec {
            id: RequestId(number),
            home,
            models: MODELS as u8,
            prompt_len: prompt,
            len_max: prompt + max,
            len_min: prompt,
            eos,
            stop_ids: Vec::new(),
            sampling: Arc::new(SamplingParams { seed, ..SamplingParams::default() }),
            constraint: None,
            target: Target::Routed,
            algorithm: 0,
            routing: None,
            logprobs: None,
            entropy: false,
        });
        let mut places = std::array::from_fn(|_| Place::Unseen);
        let queued = Queued::arrive(spec.clone(), tokens.clone(), devices.seat(active));
        places[active] = Place::Queued(queued.with_prompt_logprobs(asks(seed).then_some(2)));
        let (mut known, told) = ([0; MODELS], Told::new());
        known[active] = prompt;
        Walker { spec, places, active, tokens, known, kv: [0; MODELS], told, prompt: None, ended: false }
    }

    fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    fn check(&self) {
        for model in 0..MODELS {
            assert!(self.kv[model] <= self.known[model] && self.known[model] <= self.len());
        }
        assert_eq!(self.known[self.active], self.len());
    }

    /// One step of the active model: some or all of what it lacks, or an attempt that fails and loses its keys.
    fn advance(&mut self, devices: &mut Devices, whim: u8) {
        let me = self.active;
        let Place::Queued(mut queued) = std::mem::replace(&mut self.places[me], Place::Unseen) else {
            panic!("the active model holds the request");
        };
        if queued.is_cold() {
            queued.adopt_prefix();
            let adopted = self.len() - queued.behind();
            assert!(adopted >= self.kv[me] && (adopted as usize).is_multiple_of(PAGE_TOKENS), "{adopted} adopted");
            self.kv[me] = adopted;
        }
        assert_eq!(queued.tokens(), self.tokens);
        assert_eq!(queued.behind(), self.len() - self.kv[me]);
        let consumes = if whim.is_multiple_of(4) { 1 + u32::from(whim) % queued.behind() } else { queued.behind() };
        let (start, end) = (self.kv[me], self.kv[me] + consumes);
        let (running, row) = queued.start(consumes, Needs::default()).expect("there are pages for all");
        assert_eq!((row.start, &row.tokens[..]), (start, &self.tokens[start as usize..end as usize]));
        assert_eq!(row.draw.is_some(), end == self.len());
        if whim.is_multiple_of(7) {
            self.kv[me] = 0;
            self.places[me] = Place::Queued(running.retry(u8::MAX, NOW).expect("attempts are left"));
            return;
        }
        let output = devices.executors[me].step(&Step { rows: vec![row] }).expect("the step is sound");
        self.kv[me] = end;
        match output.rows.into_iter().next() {
            Some(RowOutput::Fed(none)) => self.places[me] = Place::Queued(running.fed(none, NOW)),
            Some(RowOutput::Drawn(drawn)) => self.settle(devices, running, drawn),
            other => panic!("{other:?}"),
        }
    }

    fn settle(&mut self, devices: &Devices, mut running: Running, mut drawn: Drawn) {
        let me = self.active;
        if let Some(prompt) = running.prompt_logprobs(&mut drawn).expect("the executor answers all") {
            assert!(self.prompt.replace(prompt).is_none(), "told twice");
        }
        let (committed, settled) = running.settle(drawn, NOW);
        if let Some(token) = committed {
            assert_eq!((token.position, token.model.index()), (self.len(), me));
            self.tokens.push(token.token);
            self.told.push((token.token, me));
            self.known[me] = self.len();
        }
        match settled {
            Settled::Stay(queued) => self.places[me] = Place::Queued(queued),
            Settled::Leave(pending, message) => {
                self.places[me] = Place::Pending(pending);
                self.hop(devices, &message);
            }
            Settled::Done(_) => {
                self.ended = true;
                for place in &mut self.places {
                    if let Place::Pending(pending) = std::mem::replace(place, Place::Unseen) {
                        pending.release();
                    }
                }
            }
            Settled::Failed(_, failure) => panic!("{failure}"),
        }
    }

    fn hop(&mut self, devices: &Devices, message: &PeerReq) {
        let to = message.to.index();
        assert_ne!(to, self.active);
        assert_eq!(message.base, self.known[to], "what the peer has not seen, and nothing else");
        assert_eq!(message.tokens[..], self.tokens[message.base as usize..]);
        assert_eq!(message.spec.is_some(), matches!(self.places[to], Place::Unseen));
        self.known[to] = self.len();
        assert_eq!(message.known[..], self.known);
        let queued = match std::mem::replace(&mut self.places[to], Place::Unseen) {
            Place::Unseen => Queued::visit(message, devices.seat(to)).expect("a first message"),
            Place::Pending(pending) => pending.resume(message, NOW).expect("a message that fits"),
            Place::Queued(_) => panic!("two models hold the request"),
        };
        self.places[to] = Place::Queued(queued);
        self.active = to;
    }
}

/// Whether a request asks for the log-probabilities of its prompt.
fn asks(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

/// What is told of a prompt, by the model where it entered.
fn of_prompt(language: &Language, prompt: &[u32], home: ModelIdx) -> Vec<TokenReport> {
    let report = |(at, &id): (usize, &u32)| {
        let said = || language.next(SKILLS[home.index()], &prompt[..at]).0;
        let logprobs = (at > 0).then(|| language.logprobs(said(), id, 2));
        TokenReport { id, model: home, entropy: None, dropped: None, logprobs }
    };
    prompt.iter().enumerate().map(report).collect()
}

proptest! {
    #[test]
    fn books_and_text_of_random_walks_are_right(
        requests in prop::collection::vec((any::<u64>(), 1u32..60, 1u32..50), 1..4),
        whims in prop::collection::vec(any::<u8>(), 64),
        eos in prop::bool::ANY,
    ) {
        let language = Language { vocab: 30, hard: 0.4, eos: eos.then_some((1, 0.02)) };
        let mut devices = Devices::new(&language);
        let eos: Vec<u32> = language.eos.iter().map(|&(eos, _)| eos).collect();
        let mut walkers: Vec<Walker> = (0u64..).zip(&requests)
            .map(|(number, &request)| Walker::new(number, request, eos.clone(), &devices))
            .collect();
        let mut turn = 0;
        while let Some(at) = (turn..turn + walkers.len()).map(|at| at % requests.len()).find(|&at| !walkers[at].ended) {
            let walker = &mut walkers[at];
            walker.advance(&mut devices, whims[turn % whims.len()].wrapping_add((turn / whims.len()) as u8));
            walker.check();
            turn += 1;
            prop_assert!(turn < 20_000, "no end");
        }
        for (walker, (seed, prompt, max)) in walkers.iter().zip(&requests) {
            let prompt = &walker.tokens[..*prompt as usize];
            let expected = tell(&language, &SKILLS, &Walk, (prompt, *seed, *max));
            prop_assert_eq!(&walker.told, &expected, "{:?}", walker.spec);
            let expected = asks(*seed).then(|| of_prompt(&language, prompt, walker.spec.home));
            prop_assert_eq!(&walker.prompt, &expected, "{:?}", walker.spec);
        }
        drop(walkers);
        for pool in &devices.pools {
            let stats = pool.stats();
            prop_assert_eq!(stats.leases, 0);
            prop_assert_eq!(stats.pages_free + stats.pages_cached, LIMITS.pages);
        }
    }
}
