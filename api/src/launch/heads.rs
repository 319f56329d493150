//! Learned heads in a launch file: where the folder is, and what its checkpoint says. Owner: the launcher. Invariant: a
//! threshold in the launch file comes before that of the checkpoint, and that before the algorithm's own default.

use super::plan::known_params;
use crate::text::ModelText;
use serde_json::{Map, Value as Json};
use std::path::{Path, PathBuf};
use tokenrouter_config::{ConfigError, LaunchFile};
use tokenrouter_core::routing::HeadSpec;
use tokenrouter_core::routing::catalog::Catalog;
use tokenrouter_gpu::heads::{self, Family, HeadSource};

/// The key under which algorithms take the folder of a converted head.
pub const KEY: &str = "router.params.head";

/// The routing parameters with the head's folder as an absolute path, and the threshold of its checkpoint where the
/// launch file gives none.
///
/// # Errors
/// A head that cannot be read, at [`KEY`].
pub fn params(file: &LaunchFile, catalog: Catalog) -> Result<Map<String, Json>, ConfigError> {
    let mut params = file.router.params.clone();
    let known = known_params(&file.router.algorithm, catalog);
    let takes = |name: &str| known.contains(&name);
    let Some(head) = params.get("head").and_then(Json::as_str).filter(|_| takes("head")) else {
        return Ok(params);
    };
    let folder = beside(file, head);
    let config = heads::describe(&folder).map_err(|error| file.error_at(KEY, format!("{KEY}: {error}")))?;
    if let Some(threshold) = config.threshold.filter(|_| takes("threshold")) {
        params.entry("threshold").or_insert_with(|| threshold.into());
    }
    params.insert("head".to_owned(), folder.display().to_string().into());
    Ok(params)
}

/// How a model is loaded with the head that the algorithm wants for it.
///
/// # Errors
/// A family or a token that does not exist, at the routing parameter.
pub fn source(file: &LaunchFile, model: &str, (head, text): (HeadSpec, &ModelText)) -> Result<HeadSource, ConfigError> {
    match head {
        HeadSpec::Checkpoint { path, family } => match Family::named(family) {
            Some(family) => Ok(HeadSource::Checkpoint { path: beside(file, &path), family }),
            None => Err(file.error_at(KEY, format!("there are no heads of family {family:?}; known are r2r, citer"))),
        },
        HeadSpec::Row { token } => match text.tokenizer.token_id(&token) {
            Some(token) => Ok(HeadSource::Row { token }),
            None => {
                let message = format!(
                    "model `{model}` has no token {token:?}; router.params.token names the token that it was trained to defer with"
                );
                Err(file.error_at("router.params.token", message))
            }
        },
    }
}

/// A path as the launch file means it, made absolute so that it stays the same file.
fn beside(file: &LaunchFile, path: &str) -> PathBuf {
    let joined = file.path().parent().unwrap_or(Path::new("")).join(path);
    std::path::absolute(&joined).unwrap_or(joined)
}
