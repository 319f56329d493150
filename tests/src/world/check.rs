//! What must hold after every play, whatever happened in it. Owner: the World.

use super::{Play, Script, reference};
use tokenrouter_core::routing::Algorithm;
use tokenrouter_core::sim::Skill;

/// When all requests have ended, nothing of them is left at any model.
pub fn assert_idle(play: &Play) {
    assert_eq!(play.end.live, 0);
    for model in &play.end.models {
        let left = (model.batcher.waiting, model.batcher.stalled, model.decode.running, model.inter_model.pending);
        assert_eq!(left, (0, 0, 0, 0), "{}: {}", model.name, play.timeline);
        assert_eq!(model.kv.leases, 0, "{}: {}", model.name, play.timeline);
        assert_eq!(model.kv.pages_free + model.kv.pages_cached, model.kv.pages_total, "{}", model.name);
        // Whatever became of an actor, its messages were handled or thrown away.
        let depths: Vec<u64> = model.instruments.mailboxes.iter().map(|mailbox| mailbox.depth).collect();
        assert_eq!(depths, [0; 6], "{}: {}", model.name, play.timeline);
        let (instruments, batcher) = (&model.instruments, &model.batcher);
        // Actors that were replaced go on for a moment, and what they say then is not heard.
        if model.subserver.children_restarts == 0 {
            let batches: u64 = instruments.batch_sizes.iter().sum();
            assert_eq!(batches, batcher.released.iter().sum::<u64>(), "{}: a size for each batch", model.name);
            assert_eq!(instruments.batch_wait.count, batcher.rows, "{}: a wait for each request", model.name);
        }
    }
}

/// Whatever happened on the way, users read what the definition of the algorithm says, as far as they got.
pub fn assert_text(script: &Script, algorithm: &dyn Algorithm, play: &Play) {
    let skills: Vec<Skill> = script.models.iter().map(|model| model.skill).collect();
    for request in script.requests() {
        let prompt = request.tokens(script.language.vocab);
        let own = request.routing().map(|changes| algorithm.with(&changes).expect("the request's parameters"));
        let algorithm = own.as_deref().unwrap_or(algorithm);
        let expected = match &request.only {
            None => reference::tell(&script.language, &skills, algorithm, (&prompt, request.seed, request.max)),
            Some(only) => {
                let index = script.models.iter().position(|model| model.name == *only).expect("a model");
                let alone = script.language.alone(skills[index], &prompt, request.max as usize);
                alone.into_iter().map(|token| (token, index)).collect()
            }
        };
        let told = play.told.get(&request.name).cloned().unwrap_or_default();
        let finished = play.timeline.contains(&format!(" {} Length", request.name))
            || play.timeline.contains(&format!(" {} EndOfText", request.name));
        assert!(!finished || told.len() == expected.len(), "{}: {}", request.name, play.timeline);
        assert_eq!(told, expected[..told.len()], "{}", request.name);
    }
}
