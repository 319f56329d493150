//! What a routed request must say: one loop over one token list, without runtime, batches, pages or time.
//! Owner: the tests. Invariant: it shares no code with the state machine.

use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::routing::{Algorithm, StepView};
use tokenrouter_core::sim::{Language, Skill};

/// Width of a logits row of every simulated model.
const WIDTH: u32 = 1000;

/// Tokens and the model of each.
pub type Told = Vec<(u32, usize)>;

/// Generates by the definition: the active model proposes, the algorithm decides, kept tokens are appended.
pub fn tell(language: &Language, skills: &[Skill], algorithm: &dyn Algorithm, request: (&[u32], u64, u32)) -> Told {
    let (prompt, seed, max) = request;
    let mut tokens = prompt.to_vec();
    let mut told = Told::new();
    let mut routes: Vec<_> = skills.iter().map(|_| algorithm.start()).collect();
    let mut active = algorithm.entry(seed).index();
    while told.len() < max as usize {
        let said = language.next(skills[active], &tokens);
        let candidate = said.0;
        let wants = algorithm.needs(ModelIdx(active as u8));
        let decision = routes[active].route(&StepView {
            request: RequestId(0),
            model: ModelIdx(active as u8),
            seed,
            prompt_len: prompt.len() as u32,
            tokens: &tokens,
            candidate,
            signals: &language.signals(wants, said, WIDTH),
        });
        let decision = decision.expect("the algorithm decides");
        if decision.keep {
            tokens.push(candidate);
            told.push((candidate, active));
            if language.eos.is_some_and(|(eos, _)| eos == candidate) {
                break;
            }
        }
        active = decision.to.index();
    }
    told
}
