//! Frames as bytes, for a peer in another process: bincode with a length in front. The only place that knows the
//! format. Invariant: a hostile frame is refused before memory is taken for it.

use tokenrouter_core::peer::Envelope;

/// A frame never takes more bytes than this; a prompt of a million tokens fits.
pub const FRAME_BYTES_MAX: usize = 8 << 20;

/// A frame could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Too long or malformed on the way out.
    #[error("frame not encodable: {0}")]
    Encode(#[from] bincode::error::EncodeError),
    /// Too long or malformed on the way in.
    #[error("frame refused: {0}")]
    Decode(#[from] bincode::error::DecodeError),
}

fn format() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<FRAME_BYTES_MAX>()
}

/// The bytes of a frame.
///
/// # Errors
/// [`WireError::Encode`].
pub fn encode(envelope: &Envelope) -> Result<Vec<u8>, WireError> {
    Ok(bincode::serde::encode_to_vec(envelope, format())?)
}

/// The frame in these bytes.
///
/// # Errors
/// [`WireError::Decode`] for anything that is not exactly one frame within the limit.
pub fn decode(bytes: &[u8]) -> Result<Envelope, WireError> {
    let (envelope, used) = bincode::serde::decode_from_slice(bytes, format())?;
    if used != bytes.len() {
        return Err(bincode::error::DecodeError::OtherString(format!("{} bytes follow", bytes.len() - used)).into());
    }
    Ok(envelope)
}
