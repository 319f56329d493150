//! A new routing algorithm for a running server: launch file and script are read again, and only `[router]` of them
//! counts. Owner: the serve command. Invariant: a file that is wrong changes nothing, and says what is wrong with it.

use super::plan::in_vocabulary;
use super::{Environment, LaunchError, Loaded, Overrides, algorithm, read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use tokenrouter_config::Router;
use tokenrouter_core::routing::reload::Reloadable;
use tokenrouter_core::text::TextCodec;

/// Reads the routing algorithm again.
pub struct Reloader {
    config: Option<PathBuf>,
    overrides: Overrides,
    environment: Environment,
    name: String,
    models: Vec<String>,
    algorithm: Arc<Reloadable>,
    codec: Arc<dyn TextCodec>,
    /// One at a time, so that the file that was read last stays.
    turn: Mutex<()>,
}

impl Reloader {
    /// For a server to be started from this launch file with these options; its algorithm can be replaced from now on.
    pub fn new(
        config: Option<PathBuf>,
        overrides: Overrides,
        environment: Environment,
        loaded: &mut Loaded,
    ) -> Reloader {
        let Router { algorithm: name, models, .. } = loaded.file.router.clone();
        let algorithm = Arc::new(Reloadable::new(loaded.algorithm.clone(), models.len()));
        loaded.algorithm = Arc::clone(&algorithm) as _;
        let codec = loaded.codec();
        Reloader { config, overrides, environment, name, models, algorithm, codec, turn: Mutex::new(()) }
    }

    /// Reads the files and lets new requests follow what they say; returns the name of the algorithm.
    ///
    /// # Errors
    /// What is wrong with them; the algorithm is as before then.
    pub fn reload(&self) -> Result<String, LaunchError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let file = read(self.config.as_deref(), &self.overrides, &self.environment)?;
        if file.router.models != self.models {
            let (now, before) = (file.router.models.join(", "), self.models.join(", "));
            let message = format!("router.models is {now} but {before} are loaded; start the server again");
            return Err(file.error_at("router.models", message).into());
        }
        if file.router.algorithm != self.name {
            let message = format!(
                "router.algorithm is {} but {} runs; its parameters and its script can be reloaded, for another \
                 algorithm start the server again",
                file.router.algorithm, self.name
            );
            return Err(file.error_at("router.algorithm", message).into());
        }
        let catalog = self.environment.catalog;
        let new = in_vocabulary(&file, algorithm(&file, catalog)?, (catalog, &*self.codec))?;
        self.algorithm.replace(new).map_err(|reason| file.error_at("router", reason))?;
        Ok(file.router.algorithm)
    }
}
