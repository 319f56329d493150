//! Writes a trained head as `convert-router` writes one. Owner: the command. Invariant: the folder appears whole or not
//! at all, and a head that is there is replaced only on request.

use crate::cli::CliError;
use crate::cli::files::Passing;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use tokenrouter_gpu::heads::{self, CONFIG_FILE, HeadConfig, HeadTensor, WEIGHTS_FILE};

/// Where a head goes.
#[derive(Debug)]
pub struct Place {
    folder: PathBuf,
}

impl Place {
    /// The folder, if it is free: not there yet, empty, or holding no more than a head that may be replaced.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a folder that holds anything else.
    pub fn free(folder: &Path, force: bool) -> Result<Place, CliError> {
        let usage = |reason: String| Err(CliError::Usage(format!("{}: {reason}", folder.display())));
        let entries = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Place { folder: folder.to_owned() }),
            Err(error) => return usage(format!("{error}; name another folder with --out")),
            Ok(entries) => entries,
        };
        for entry in entries {
            let name = entry.map_err(|error| at(folder, &error))?.file_name();
            if name != CONFIG_FILE && name != WEIGHTS_FILE {
                let name = name.display();
                return usage(format!("holds {name}, which is no part of a head; name another folder with --out"));
            }
            if !force {
                return usage("holds a head; name another folder with --out, or replace it with --force".into());
            }
        }
        Ok(Place { folder: folder.to_owned() })
    }

    /// Writes the head into a folder beside it, which then takes its place.
    ///
    /// # Errors
    /// [`CliError::Io`] when the disk refuses.
    pub fn write(&self, config: &HeadConfig, tensors: &BTreeMap<String, Tensor>) -> Result<(), CliError> {
        let absolute = std::path::absolute(&self.folder).map_err(|error| at(&self.folder, &error))?;
        let beside = |what: &str| {
            let mut name = absolute.file_name().unwrap_or_default().to_owned();
            name.push(format!(".{what}-{}", std::process::id()));
            absolute.with_file_name(name)
        };
        let (part, old) = (Passing::new(beside("part")), beside("old"));
        let written = std::fs::create_dir_all(part.path()).and_then(|()| {
            heads::write(config, &parts(config, tensors)?, part.path()).map_err(io::Error::other)?;
            let replaced = absolute.exists();
            if replaced {
                std::fs::rename(&absolute, &old)?;
            }
            part.keep_as(&absolute).inspect_err(|_| {
                if replaced {
                    // The old head stays under the name it has now, if not even this works.
                    let _ = std::fs::rename(&old, &absolute);
                }
            })
        });
        // What cannot be removed is in nobody's way.
        if written.is_ok() {
            let _ = std::fs::remove_dir_all(&old);
        }
        written.map_err(|error| at(&self.folder, &error))
    }
}

/// The tensors of the description, in its order.
fn parts(config: &HeadConfig, tensors: &BTreeMap<String, Tensor>) -> io::Result<Vec<HeadTensor>> {
    let values = |name: &str| -> candle_core::Result<(Vec<usize>, Vec<u8>)> {
        let tensor = tensors.get(name).ok_or_else(|| candle_core::Error::Msg(format!("{name} was not trained")))?;
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        Ok((tensor.dims().to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect()))
    };
    let one = |(name, _): (String, _)| values(&name).map(|(dims, bytes)| (name, dims, bytes)).map_err(io::Error::other);
    config.tensors().into_iter().map(one).collect()
}

fn at(path: &Path, error: &io::Error) -> CliError {
    CliError::Io(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
