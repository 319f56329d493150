//! The one place where everything is put together: launch file -> model files -> checks -> weights -> runtime -> HTTP.
//! Owner: the command that was given. Invariant: every check that needs no weights comes before any weight is read, and
//! each failure is one line that names the file, the key and the remedy.

mod cores;
mod cuda;
pub mod embedded;
pub mod environment;
mod faults;
mod heads;
mod http;
mod keys;
mod load;
mod plan;
mod reload;
mod scripted;
mod thresholds;
mod tls;

pub use environment::Environment;
pub use http::{app, served};
pub use keys::{keys, reload_keys};
pub use load::Loaded;
pub use plan::{Plan, PlannedModel, algorithm};
pub use reload::Reloader;
pub use tls::Certificate;

use crate::hub::{Hub, HubError};
use crate::progress::Progress;
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use tokenrouter_actors::runtime::StartError;
use tokenrouter_config::{ConfigError, LaunchFile, Source};
use tokenrouter_core::routing::catalog::Catalog;
use tokenrouter_gpu::load::LoadError;

/// Why nothing was launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The launch file, or what it names, is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A command-line option is wrong.
    #[error("{0}")]
    Option(String),
    /// The files of the embedded default could not be laid out.
    #[error("{}: cannot lay out the embedded models: {reason}; set XDG_CACHE_HOME to a folder that can be written", folder.display())]
    Embedded {
        /// Where they were to go.
        folder: PathBuf,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A model could not be downloaded.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Weights could not be loaded although the checks passed.
    #[error("model {model}: {reason}")]
    Load {
        /// Name of the model.
        model: String,
        /// What went wrong.
        reason: Box<LoadError>,
    },
    /// The runtime refused the settings.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The server could not be opened.
    #[error("{0}")]
    Server(String),
}

impl LaunchError {
    /// 2 when the user's settings are wrong, 1 when something else failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            LaunchError::Config(_) | LaunchError::Option(_) | LaunchError::Start(_) => 2,
            _ => 1,
        }
    }
}

/// Command-line options that come before the launch file.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Instead of `server.host`.
    pub host: Option<String>,
    /// Instead of `server.port`.
    pub port: Option<u16>,
    /// On top of `[router.params]`.
    pub params: Vec<(String, Json)>,
}

/// Reads the launch file, or the embedded default when none is named.
///
/// # Errors
/// [`LaunchError::Config`], or what keeps the embedded files from being laid out.
pub fn read(
    config: Option<&Path>,
    overrides: &Overrides,
    environment: &Environment,
) -> Result<LaunchFile, LaunchError> {
    let mut file = match config {
        Some(path) => LaunchFile::load(path)?,
        None => LaunchFile::load(&embedded::lay_out(&environment.cache)?.join(embedded::LAUNCH_FILE))?,
    };
    faults::check(&file, environment)?;
    if let Some(host) = &overrides.host {
        file.server.host.clone_from(host);
    }
    if let Some(port) = overrides.port {
        file.server.port = port;
    }
    with_params(file, &overrides.params, environment.catalog)
}

/// The launch file with routing parameters of the command line on top.
///
/// # Errors
/// [`LaunchError::Option`] when they are wrong, [`LaunchError::Config`] when the file is wrong without them.
pub fn with_params(
    mut file: LaunchFile,
    params: &[(String, Json)],
    catalog: Catalog,
) -> Result<LaunchFile, LaunchError> {
    if params.is_empty() {
        return Ok(file);
    }
    algorithm(&file, catalog)?;
    file.router.params.extend(params.iter().cloned());
    algorithm(&file, catalog).map_err(|error| LaunchError::Option(format!("--params: {}", error.message)))?;
    Ok(file)
}

/// Whether models of a hub may be downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Downloads {
    /// Whatever is missing is downloaded.
    Allowed,
    /// Only what the cache holds already.
    CachedOnly,
}

/// Where each model's files are, downloading what is missing; `None` for a hub model that is neither there nor may be
/// downloaded.
///
/// # Errors
/// [`LaunchError::Config`] for a local path that does not exist, [`LaunchError::Hub`] for a failed download.
pub fn resolve(
    file: &LaunchFile,
    downloads: Downloads,
    (environment, progress): (&Environment, &Progress),
) -> Result<Vec<Option<PathBuf>>, LaunchError> {
    // Local paths first: a typing error shows before a long download.
    for model in &file.models {
        if let Source::Local(path) = &model.path
            && !path.exists()
        {
            let key = format!("models.{}.path", model.name);
            let message = format!(
                "{} does not exist; name a folder in Hugging Face layout, a .gguf file or hf:owner/name",
                path.display()
            );
            return Err(file.error_at(&key, message).into());
        }
    }
    let fetch = |source: &Source, name: &str| -> Result<Option<PathBuf>, LaunchError> {
        let hub_source = match source {
            Source::Local(path) => return Ok(Some(path.clone())),
            Source::Hub(hub_source) => hub_source,
        };
        let key = format!("models.{name}.path");
        let settings = environment.hub.clone().map_err(|reason| file.error_at(&key, reason))?;
        let hub = Hub::new(settings)?;
        match downloads {
            Downloads::Allowed => Ok(Some(hub.fetch(hub_source, progress)?)),
            Downloads::CachedOnly => Ok(hub.cached(hub_source)),
        }
    };
    file.models.iter().map(|model| fetch(&model.path, &model.name)).collect()
}

/// Everything from the launch file to a checked plan, downloads included.
///
/// # Errors
/// The first thing that is wrong.
pub fn prepare(file: LaunchFile, environment: &Environment, progress: &Progress) -> Result<Plan, LaunchError> {
    plan::algorithm(&file, environment.catalog)?;
    let paths = resolve(&file, Downloads::Allowed, (environment, progress))?;
    Plan::new(file, paths.into_iter().flatten().collect(), environment)
}
