//! Frames as bytes, for a peer in another process: bincode with a length in front (u32, little endian). The only place
//! that knows the format. Invariant: a hostile frame is refused before memory is taken for what it only claims to hold.

use super::identity::Identity;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::peer::Envelope;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Version of everything below. Peers of another version are refused.
pub const PROTOCOL: u32 = 5;

/// A frame never takes more bytes than this, its length not counted; a prompt of a million tokens fits.
pub const FRAME_BYTES_MAX: usize = 8 << 20;

/// The first frame either way takes at most this.
pub const HELLO_BYTES_MAX: usize = 64 << 10;

/// Bytes of the length in front.
pub const LENGTH_BYTES: usize = 4;

/// A frame without content: the sender is alive.
pub const BEAT: [u8; LENGTH_BYTES] = [0; LENGTH_BYTES];

/// Memory taken for a frame before its bytes have come.
const READ_AHEAD_BYTES: usize = 64 << 10;

/// The first frame of a connection, from the side that dials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the sender; first, so that it can be read whatever follows.
    pub protocol: u32,
    /// The subserver all frames come from.
    pub from: ModelIdx,
    /// The subserver all frames go to.
    pub to: ModelIdx,
    /// What the sender takes the server for.
    pub server: Identity,
}

/// The answer to a [`Hello`], and the only frame in this direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Frames may follow.
    Welcome,
    /// The connection ends, and why.
    Refused(String),
}

/// Every other frame.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Parcel {
    /// The subserver addressed.
    pub to: ModelIdx,
    /// What it is told.
    pub envelope: Envelope,
}

/// A frame could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Not representable.
    #[error("frame not encodable: {0}")]
    Encode(#[from] bincode::error::EncodeError),
    /// Malformed.
    #[error("frame refused: {0}")]
    Decode(#[from] bincode::error::DecodeError),
    /// Longer than allowed.
    #[error("a frame of {bytes} bytes where at most {limit} are allowed")]
    TooLong {
        /// Bytes of it.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Ended before its announced length.
    #[error("a frame of {announced} bytes ended after {got}")]
    Truncated {
        /// Bytes announced.
        announced: usize,
        /// Bytes that came.
        got: usize,
    },
    /// Another version of the protocol.
    #[error("the peer speaks protocol {theirs}, this process {PROTOCOL}; run the same version in all processes")]
    Protocol {
        /// Of the peer.
        theirs: u32,
    },
    /// One of the two does not want the other.
    #[error("refused: {0}")]
    Refused(String),
    /// The connection failed or ended.
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn format() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<FRAME_BYTES_MAX>()
}

/// The whole frame: length and content.
///
/// # Errors
/// [`WireError::TooLong`] and [`WireError::Encode`].
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, WireError> {
    let mut frame = BEAT.to_vec();
    bincode::serde::encode_into_std_write(value, &mut frame, format())?;
    let bytes = frame.len() - LENGTH_BYTES;
    if bytes > FRAME_BYTES_MAX {
        return Err(WireError::TooLong { bytes, limit: FRAME_BYTES_MAX });
    }
    frame[..LENGTH_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
    Ok(frame)
}

/// The value in the content of a frame.
///
/// # Errors
/// [`WireError::Decode`] for anything that is not exactly one value.
pub fn decode<T: DeserializeOwned>(content: &[u8]) -> Result<T, WireError> {
    let (value, used) = bincode::serde::decode_from_slice(content, format())?;
    if used != content.len() {
        let surplus = format!("{} bytes follow", content.len() - used);
        return Err(bincode::error::DecodeError::OtherString(surplus).into());
    }
    Ok(value)
}

/// The [`Hello`] in the content of a first frame, after a look at its protocol version alone.
///
/// # Errors
/// [`WireError::Protocol`], and as [`decode`].
pub fn decode_hello(content: &[u8]) -> Result<Hello, WireError> {
    let (theirs, _) = bincode::serde::decode_from_slice(content, format())?;
    if theirs != PROTOCOL {
        return Err(WireError::Protocol { theirs });
    }
    decode(content)
}

/// Reads the content of the next frame, `limit` bytes at most; empty for a [`BEAT`].
///
/// # Errors
/// [`WireError::Io`] when the connection ends between frames (unexpected end) or fails, [`WireError::Truncated`] when
/// it ends within one, [`WireError::TooLong`].
pub async fn read_frame<R: AsyncRead + Unpin>(source: &mut R, limit: usize) -> Result<Vec<u8>, WireError> {
    let bytes = source.read_u32_le().await? as usize;
    if bytes > limit {
        return Err(WireError::TooLong { bytes, limit });
    }
    let mut content = Vec::with_capacity(bytes.min(READ_AHEAD_BYTES));
    source.take(bytes as u64).read_to_end(&mut content).await?;
    match content.len() == bytes {
        true => Ok(content),
        false => Err(WireError::Truncated { announced: bytes, got: content.len() }),
    }
}

#[cfg(test)]
mod tests;
