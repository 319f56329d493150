//! The archive of a torch checkpoint: a zip file whose entries are stored, not compressed. Owner: the checkpoint reader.
//! Invariant: an entry that is listed lies inside the file and its bytes have the checksum that the archive states.
//!
//! `torch.save` stores every entry, so no decompressor is needed, and none can be fed a bomb. Sizes are those of the
//! central directory (the local headers of torch leave them out). Format: PKWARE APPNOTE.TXT 6.3, sections 4.3 and 4.4.

use std::ops::Range;

/// Most entries of an archive.
const MAX_ENTRIES: usize = 65_535;
/// Bytes of the record that ends an archive, without its comment.
const END: usize = 22;
/// Bytes of a header in the central directory, and of one before an entry, without their variable parts.
const CENTRAL: usize = 46;
const LOCAL: usize = 30;
/// A field whose value is in a 64-bit extension.
const EXTENDED: u32 = u32::MAX;

type Result<T> = std::result::Result<T, String>;

/// An entry of an archive.
#[derive(Clone, Debug)]
pub struct ZipEntry {
    /// Its name, folders included.
    pub name: String,
    /// Its bytes in the file.
    pub range: Range<usize>,
    crc: u32,
}

/// Lists the entries of an archive.
///
/// # Errors
/// What is wrong with the archive: truncated, compressed, encrypted, split, larger than 4 GiB.
pub fn entries(file: &[u8]) -> Result<Vec<ZipEntry>> {
    let end = find_end(file).ok_or("is no zip archive or its end is missing; save the checkpoint again")?;
    let (count, start) = (usize::from(u16_at(file, end + 10)?), u32_at(file, end + 16)?);
    if count == MAX_ENTRIES || start == EXTENDED {
        return Err("is an archive of more than 4 GiB or 65534 entries; router checkpoints are smaller".into());
    }
    let mut at = start as usize;
    let mut found = Vec::with_capacity(count.min(1024));
    for _ in 0..count {
        let (entry, next) = central(file, at)?;
        found.push(entry);
        at = next;
    }
    Ok(found)
}

impl ZipEntry {
    /// The bytes of the entry.
    ///
    /// # Errors
    /// A checksum that differs.
    pub fn bytes<'a>(&self, file: &'a [u8]) -> Result<&'a [u8]> {
        let bytes = file.get(self.range.clone()).ok_or_else(|| outside(&self.name))?;
        let found = crc32(bytes);
        if found != self.crc {
            return Err(format!(
                "entry {:?} is damaged: checksum {found:08x}, stated {:08x}; download it again",
                self.name, self.crc
            ));
        }
        Ok(bytes)
    }
}

/// Position of the record that ends the archive; a comment of up to 65535 bytes may follow it.
fn find_end(file: &[u8]) -> Option<usize> {
    let last = file.len().checked_sub(END)?;
    let first = last.saturating_sub(usize::from(u16::MAX));
    (first..=last).rev().find(|&at| file[at..].starts_with(b"PK\x05\x06"))
}

/// The entry that the central header at `at` describes, and where the next header is.
fn central(file: &[u8], at: usize) -> Result<(ZipEntry, usize)> {
    if file.get(at..).is_none_or(|rest| !rest.starts_with(b"PK\x01\x02")) {
        return Err("is truncated or damaged: its directory does not lie where the archive says".into());
    }
    let (name_len, extra, comment) = (u16_at(file, at + 28)?, u16_at(file, at + 30)?, u16_at(file, at + 32)?);
    let name_start = at + CENTRAL;
    let name_end = name_start + usize::from(name_len);
    let name = file.get(name_start..name_end).ok_or("is truncated in the name of an entry")?;
    let name = std::str::from_utf8(name).map_err(|_| "has an entry whose name is not UTF-8")?.to_owned();
    let (flags, method, crc) = (u16_at(file, at + 8)?, u16_at(file, at + 10)?, u32_at(file, at + 16)?);
    let (packed, size, local) = (u32_at(file, at + 20)?, u32_at(file, at + 24)?, u32_at(file, at + 42)?);
    if flags & 1 != 0 {
        return Err(format!("entry {name:?} is encrypted"));
    }
    if method != 0 || packed != size {
        return Err(format!("entry {name:?} is compressed; torch.save stores entries, save the checkpoint again"));
    }
    if [packed, size, local].contains(&EXTENDED) {
        return Err(format!("entry {name:?} needs more than 4 GiB; router checkpoints are smaller"));
    }
    let range = local_range(file, local as usize, size as usize).ok_or_else(|| outside(&name))?;
    Ok((ZipEntry { name, range, crc }, name_end + usize::from(extra) + usize::from(comment)))
}

/// Where the bytes behind the local header at `at` are, if they and the header lie inside the file.
fn local_range(file: &[u8], at: usize, size: usize) -> Option<Range<usize>> {
    file.get(at..)?.starts_with(b"PK\x03\x04").then_some(())?;
    let (name, extra) = (u16_at(file, at + 26).ok()?, u16_at(file, at + 28).ok()?);
    let start = at + LOCAL + usize::from(name) + usize::from(extra);
    let end = start.checked_add(size)?;
    (end <= file.len()).then_some(start..end)
}

fn outside(name: &str) -> String {
    format!("entry {name:?} lies outside of the file; it is truncated, download it again")
}

fn u16_at(file: &[u8], at: usize) -> Result<u16> {
    let bytes = file.get(at..).and_then(|rest| rest.first_chunk()).ok_or("is truncated in its directory")?;
    Ok(u16::from_le_bytes(*bytes))
}

fn u32_at(file: &[u8], at: usize) -> Result<u32> {
    let bytes = file.get(at..).and_then(|rest| rest.first_chunk()).ok_or("is truncated in its directory")?;
    Ok(u32::from_le_bytes(*bytes))
}

/// CRC-32 as zip has it (polynomial 0x04c11db7, reflected).
pub fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0u32; 256];
        let mut index = 0;
        while index < 256 {
            let (mut value, mut bit) = (index as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
                bit += 1;
            }
            table[index] = value;
            index += 1;
        }
        table
    };
    !bytes.iter().fold(!0u32, |crc, &byte| TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ (crc >> 8))
}
