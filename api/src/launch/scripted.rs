//! The script of a launch file: found, read and compiled. Owner: the launcher. Invariant: the core reads no files, so the
//! text of a script goes to it among the parameters; it is never part of the launch file that is printed.

use serde_json::Value as Json;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenrouter_config::{ConfigError, LaunchFile};
use tokenrouter_core::routing::catalog::Catalog;
use tokenrouter_core::routing::{Algorithm, RoutingError, script};

/// Bytes of a script.
const SCRIPT_BYTES_MAX: u64 = 1 << 20;

/// Key of the launch file that names the script.
const FILE: &str = "router.params.file";

/// The scripted algorithm of a launch file.
///
/// # Errors
/// At `router.params.file` when the script cannot be read; in the script, as `path:line:column: message`, otherwise.
pub fn algorithm(file: &LaunchFile, catalog: Catalog) -> Result<Arc<dyn Algorithm>, ConfigError> {
    let router = &file.router;
    let path = path(file)?;
    let wrong = |message: String| file.error_at(FILE, message);
    let text = read(&path).map_err(|reason| wrong(format!("{FILE}: {}: {reason}", path.display())))?;
    if router.params.contains_key(script::SOURCE) {
        let key = format!("router.params.{}", script::SOURCE);
        return Err(file.error_at(&key, format!("{key}: a script has a file of its own; give its name as `file`")));
    }
    let mut params = router.params.clone();
    params.insert("file".to_owned(), Json::String(path.display().to_string()));
    params.insert(script::SOURCE.to_owned(), Json::String(text));
    catalog.build(&router.algorithm, &Json::Object(params), router.models.len()).map_err(|error| match error {
        RoutingError::Param { message, .. } => at_script(&path, message),
        RoutingError::Models { .. } => file.error_at("router.models", format!("{error}; change router.models")),
        error => wrong(error.to_string()),
    })
}

/// Where the script is.
fn path(file: &LaunchFile) -> Result<PathBuf, ConfigError> {
    match file.router.params.get("file") {
        Some(Json::String(name)) => Ok(file.path().parent().unwrap_or(Path::new("")).join(name)),
        Some(other) => Err(file.error_at(FILE, format!("{FILE} = {other}: must be the name of a script"))),
        None => Err(file.error_at(
            "router.params",
            "algorithm \"script\" needs the name of a script: [router.params] file = \"my_router.rhai\"",
        )),
    }
}

fn read(path: &Path) -> Result<String, String> {
    let open = std::fs::File::open(path).map_err(|error| format!("cannot read the script: {error}"))?;
    let mut bytes = Vec::new();
    open.take(SCRIPT_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("cannot read the script: {error}"))?;
    if bytes.len() as u64 > SCRIPT_BYTES_MAX {
        return Err(format!("a script has at most {SCRIPT_BYTES_MAX} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "the script is not UTF-8 text".to_owned())
}

/// An error in the script itself: its own place comes first.
fn at_script(path: &Path, message: String) -> ConfigError {
    let start = format!("{}: ", path.display());
    let message = message.strip_prefix(&start).unwrap_or(&message);
    let placed = message.strip_prefix(&format!("{}:", path.display())).and_then(|rest| {
        let mut parts = rest.splitn(3, ':');
        let (line, column) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some((tokenrouter_config::Place { line, column }, parts.next()?.trim_start().to_owned()))
    });
    let (place, message) = match placed {
        Some((place, message)) => (Some(place), message),
        None => (None, message.to_owned()),
    };
    ConfigError { path: path.to_owned(), place, message }
}
