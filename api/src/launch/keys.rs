//! The keys a server asks for: read from the files of the launch file and from the environment, at the start and again
//! while it runs. Owner: the serve command. Invariant: no error, log line or printed launch file says a key; only digests
//! of keys outlive the reading; a server that asked for keys never stops asking because of a file.

use super::{Environment, LaunchError};
use crate::http::keys::Keys;
use std::path::Path;
use tokenrouter_config::LaunchFile;

/// Shorter keys can be guessed, longer ones are no keys but files of another kind.
const KEY_CHARS: std::ops::RangeInclusive<usize> = 8..=512;

/// Reads all keys; those of the files and of the environment count alike.
///
/// # Errors
/// [`LaunchError::Config`] for a file that cannot be read or holds what is no key, [`LaunchError::Option`] for a variable
/// of that kind.
pub fn keys(file: &LaunchFile, environment: &Environment) -> Result<Keys, LaunchError> {
    let mut api = Vec::new();
    if let Some(path) = &file.server.api_keys_file {
        api.extend(in_file(file, ("server.api_keys_file", path))?);
    }
    if let Some(variable) = &environment.api_keys {
        api.extend(in_variable("TOKENROUTER_API_KEYS", variable.reveal())?);
    }
    let admin = match (&environment.admin_key, &file.server.admin_key_file) {
        (Some(variable), _) => one(in_variable("TOKENROUTER_ADMIN_KEY", variable.reveal())?)
            .map_err(|count| LaunchError::Option(format!("TOKENROUTER_ADMIN_KEY holds {count} keys; give one")))?,
        (None, Some(path)) => {
            let key = "server.admin_key_file";
            one(in_file(file, (key, path))?)
                .map_err(|count| file.error_at(key, format!("{} holds {count} keys; give one", path.display())))?
        }
        (None, None) => None,
    };
    Ok(Keys::new(api.iter().map(String::as_str), admin.as_deref()))
}

/// Reads the files of the keys again, and lets those of a running server follow.
///
/// # Errors
/// As [`keys`], and files that would let everybody in where a key was asked for; the keys are as before then.
pub fn reload_keys(file: &LaunchFile, environment: &Environment, running: &Keys) -> Result<(), LaunchError> {
    let new = keys(file, environment)?;
    let gone = |what: &str| LaunchError::Option(format!("{what}, but there was one before; start the server again"));
    if running.guard_api() && !new.guard_api() {
        return Err(gone("no API key is left"));
    }
    if running.guard_admin() && !new.guard_admin() {
        return Err(gone("no admin key is left"));
    }
    running.replace(&new);
    Ok(())
}

/// The only one of some keys; how many there are if there are more.
fn one(mut keys: Vec<String>) -> Result<Option<String>, usize> {
    if keys.len() > 1 { Err(keys.len()) } else { Ok(keys.pop()) }
}

/// One key a line; empty lines and those that start with `#` are left out.
fn in_file(file: &LaunchFile, (name, path): (&str, &Path)) -> Result<Vec<String>, LaunchError> {
    let error = |what: String| file.error_at(name, format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|reason| error(format!("cannot be read: {reason}")))?;
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
    let mut keys = Vec::new();
    for (number, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        let key = checked(line).map_err(|fault| error(format!("line {number} is no key: {fault}")))?;
        keys.push(key);
    }
    if keys.is_empty() {
        return Err(error("holds no key; write one a line, or remove the setting".to_owned()).into());
    }
    Ok(keys)
}

/// Keys with commas or white space between them.
fn in_variable(name: &str, text: &str) -> Result<Vec<String>, LaunchError> {
    let error = |what: String| LaunchError::Option(format!("{name} {what}"));
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let keys: Vec<String> = words
        .enumerate()
        .map(|(at, word)| {
            checked(word).map_err(|fault| error(format!("holds what is no key, number {}: {fault}", at + 1)))
        })
        .collect::<Result<_, _>>()?;
    if keys.is_empty() { Err(error("holds no key; unset it".to_owned())) } else { Ok(keys) }
}

fn checked(key: &str) -> Result<String, String> {
    let (low, high) = (KEY_CHARS.start(), KEY_CHARS.end());
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("keys are visible ASCII characters without spaces".to_owned());
    }
    if !KEY_CHARS.contains(&key.len()) {
        return Err(format!("it has {} characters, keys have {low} to {high}", key.len()));
    }
    Ok(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_lists_keys_and_never_shows_them() {
        assert_eq!(
            in_variable("V", " first-key,second-key\n").map_err(|error| error.to_string()),
            Ok(vec!["first-key".to_owned(), "second-key".to_owned()])
        );
        for (text, says) in [
            ("first-key,short", "V holds what is no key, number 2: it has 5 characters, keys have 8 to 512"),
            ("schlüssel-eins", "V holds what is no key, number 1: keys are visible ASCII characters without spaces"),
            (" , ", "V holds no key; unset it"),
        ] {
            let error = in_variable("V", text).expect_err(text);
            assert_eq!((error.exit_code(), error.to_string()), (2, says.to_owned()));
        }
        assert_eq!(one(vec!["a".to_owned(), "b".to_owned()]), Err(2));
    }
}
