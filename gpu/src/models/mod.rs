//! Model architectures: one file each over the shared blocks, and the list that registers them. Owner: loading asks the
//! list. Invariant: a new architecture is one file here and one line in [`build`]'s list.

pub mod blocks;
mod llama;
pub mod parts;
mod qwen2;
mod qwen3;

use crate::load::LoadError;
use crate::ops::Ops;
use blocks::Decoder;
use parts::Parts;

type Build<O> = fn(&mut Parts<'_, O>) -> Result<Decoder<O>, LoadError>;

/// The registration list: neutral architecture name (as [`crate::weights::ModelConfig::architecture`] has it) and builder.
fn architectures<O: Ops>() -> [(&'static str, Build<O>); 3] {
    [("llama", llama::build), ("qwen2", qwen2::build), ("qwen3", qwen3::build)]
}

/// Builds the decoder of the architecture that the configuration names.
///
/// # Errors
/// [`LoadError::Architecture`] for a name that is not registered, otherwise whatever the architecture reports.
pub fn build<O: Ops>(parts: &mut Parts<'_, O>) -> Result<Decoder<O>, LoadError> {
    let list = architectures::<O>();
    let wanted = &parts.config.architecture;
    match list.iter().find(|(name, _)| name == wanted) {
        Some((_, build)) => build(parts),
        None => {
            let known = list.map(|(name, _)| name).join(", ");
            Err(LoadError::Architecture { name: wanted.clone(), known })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;
    use crate::weights::ARCHITECTURES;

    #[test]
    fn every_architecture_that_loads_also_builds() {
        let built: Vec<&str> = architectures::<Cpu>().iter().map(|(name, _)| *name).collect();
        let loads: Vec<&str> = ARCHITECTURES.iter().map(|architecture| architecture.name).collect();
        assert_eq!(built, loads);
    }
}
