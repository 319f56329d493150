//! Whether a server can be made of this. Owner: the start of the runtime. Invariant: pure; what passes can be started unless
//! the machine fails.

use super::{MODELS_MAX, RuntimeSpec, StartError};
use tokenrouter_core::plan::STEP_TOKENS_MIN;

/// # Errors
/// [`StartError`] naming the setting.
pub(super) fn check(spec: &RuntimeSpec) -> Result<(), StartError> {
    let setting = |message: String| Err(StartError::Setting(message));
    if spec.models.is_empty() || spec.models.len() > MODELS_MAX {
        return setting(format!("a server has 1 to {MODELS_MAX} models, not {}", spec.models.len()));
    }
    if spec.live_max == 0 {
        return setting("live_max must be at least 1".into());
    }
    if spec.batching.prefill_ahead && spec.batching.execution.takes_turns() {
        return setting("batching.prefill_ahead needs models that step when they may; set execution to async".into());
    }
    for model in &spec.models {
        let limits = &model.limits;
        if limits.pages == 0 || limits.rows_max == 0 || limits.context_len < 2 {
            return setting(format!("model {}: every limit of its executor must be positive: {limits:?}", model.name));
        }
        if limits.step_tokens_max < STEP_TOKENS_MIN {
            let name = &model.name;
            return setting(format!("model {name}: step_tokens_max must be at least {STEP_TOKENS_MIN}"));
        }
    }
    spec.process.check(&spec.models).map_err(StartError::Setting)?;
    spec.batching.policy.build(spec.models.len()).map(drop).map_err(StartError::Setting)
}
