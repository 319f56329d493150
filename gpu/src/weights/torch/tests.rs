//! Archives and pickles that no torch wrote.

use super::*;
use crate::weights::testing::Scratch;

/// A stored-only archive, as torch lays it out.
pub(crate) fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in entries {
        let start = file.len() as u32;
        let fields = |local: bool| {
            let mut out = if local { b"PK\x03\x04\x14\0".to_vec() } else { b"PK\x01\x02\x14\0\x14\0".to_vec() };
            out.extend([0; 8]);
            out.extend(zip::crc32(bytes).to_le_bytes());
            out.extend([(bytes.len() as u32).to_le_bytes(), (bytes.len() as u32).to_le_bytes()].concat());
            out.extend((name.len() as u16).to_le_bytes());
            out.extend(vec![0; if local { 2 } else { 12 }]);
            if !local {
                out.extend(start.to_le_bytes());
            }
            out.extend(name.bytes());
            out
        };
        directory.extend(fields(false));
        file.extend(fields(true));
        file.extend(*bytes);
    }
    let (start, count) = (file.len() as u32, entries.len() as u16);
    file.extend(&directory);
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    file.extend([(directory.len() as u32).to_le_bytes(), start.to_le_bytes()].concat());
    file.extend([0, 0]);
    file
}

fn open(pickle: &[u8]) -> Result<Checkpoint> {
    let scratch = Scratch::new();
    Checkpoint::open(&scratch.write("c.pt", archive(&[("c/data.pkl", pickle), ("c/data/0", &[0, 0, 128, 63])])))
}

fn refused(pickle: &[u8]) -> String {
    open(pickle).map(|_| ()).expect_err("a pickle that must be refused").to_string()
}

/// A tensor of the storage above, with this shape.
fn tensor(elements: &[u8], shape: &[u8], stride: &[u8]) -> Vec<u8> {
    let parts: [&[u8]; 8] = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu",
        elements,
        b"tQK\0",
        shape,
        stride,
        b"\x89ccollections\nOrderedDict\n)RtR",
        b"",
        b".",
    ];
    parts.concat()
}

#[test]
fn values_are_read_as_they_were_saved() {
    let pickle = b"\x80\x02}q\0(X\x01\0\0\0aK\x07X\x01\0\0\0bG\x3f\xe0\0\0\0\0\0\0X\x01\0\0\0c](J\xff\xff\xff\xff\x8a\x02\x00\x80NX\x02\0\0\0hieX\x01\0\0\0d\x88u.";
    let checkpoint = open(pickle).unwrap();
    let root = checkpoint.root();
    assert_eq!(root.get("a").and_then(Value::as_i64), Some(7));
    assert_eq!(root.get("b").and_then(Value::as_f64), Some(0.5));
    assert_eq!(root.get("d").and_then(Value::as_bool), Some(true));
    let items: Vec<Value<'_>> = root.get("c").and_then(Value::items).unwrap().collect();
    assert_eq!((items[0].as_i64(), items[1].as_i64()), (Some(-1), Some(-32768)));
    assert_eq!((items[2].kind(), items[3].as_str()), ("nothing", Some("hi")));
    assert!(root.get("e").is_none());
    let one = open(&tensor(b"K\x01", b"K\x01\x85", b"K\x01\x85")).unwrap();
    assert_eq!(one.tensor("t", one.root()).unwrap(), [1.0]);
}

#[test]
fn whatever_would_run_is_refused_by_its_name() {
    for (pickle, words) in [
        (&b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."[..], "os.system"),
        (b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.", "builtins.eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93)R.", "os.system"),
        (b"\x80\x02ctorch\nload\n)R.", "torch.load"),
        (b"\x80\x02ctorch.hub\nload\n)R.", "torch.hub.load"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "builds an object"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\0\0\0aK\x01s\x85R.", "calls"),
        (b"\x80\x02]}b.", "state of a list"),
        (b"\x80\x02(ios\nsystem\n.", "opcode 0x69"),
        (b"\x80\x02X\x01\0\0\0aQ.", "persistent id"),
        (b"\x80\x02\x82\x01.", "opcode 0x82"),
    ] {
        let error = refused(pickle);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn sizes_that_lie_take_no_memory() {
    let dim = |bytes: &[u8; 4]| [&b"J"[..], bytes, b"\x85"].concat();
    let huge = dim(&[255, 255, 255, 127]);
    for (pickle, words) in [
        (tensor(b"K\x01", &huge, b"K\x01\x85"), "beyond the limit"),
        (tensor(b"K\x01", &dim(&[0, 0, 0, 16]), b"K\0\x85"), "repeats its storage"),
        (tensor(b"K\x02", b"K\x01\x85", b"K\x01\x85"), "are not 2 elements"),
        (tensor(b"K\x01", &dim(&[255; 4]), b"K\x01\x85"), "a dimension of -1"),
        (tensor(b"K\x01", b"K\x01\x85", b"K\x01K\x01\x86"), "1 dimensions with 2 strides"),
    ] {
        let error = match open(&pickle) {
            Err(error) => error.to_string(),
            Ok(checkpoint) => checkpoint.tensor("t", checkpoint.root()).unwrap_err().to_string(),
        };
        assert!(error.contains(words), "{error}");
    }
    assert!(refused(b"\x80\x02X\xff\xff\xff\x7f").contains("truncated"));
    assert!(refused(b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffa").contains("truncated"));
    assert!(refused(b"\x80\x02K\x01").contains("without a stop"));
    assert!(refused(b"\x80\x02h\x09.").contains("never stored"));
    assert!(refused(b"\x80\x02.").contains("not there"));
    // A long name that is mentioned very often is stored once.
    let name = [&(4u32 << 20).to_le_bytes()[..], &vec![b'k'; 4 << 20]].concat();
    let id = [b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX", &name[..], b"NK\x01tq\0"].concat();
    let often = [&id[..], &b"h\0Q".repeat(100_000), b"."].concat();
    assert_eq!(open(&often).unwrap().root().kind(), "a storage");
    let marks = [&b"\x80\x02"[..], &vec![b'('; 2 << 20], b"."].concat();
    assert!(refused(&marks).contains("more than"));
    // Depth costs no stack: values lie side by side.
    let deep = [b"\x80\x02", &b"}X\x01\0\0\0a".repeat(200_000)[..], b"N", &b"s".repeat(200_000), b"."].concat();
    let deep = open(&deep).unwrap();
    assert_eq!(deep.root().get("a").and_then(|inner| inner.get("a")).map(Value::kind), Some("a dictionary"));
    // A list that contains itself is a value like any other.
    let cycle = open(b"\x80\x02]q\0h\0a.").unwrap();
    let inner = cycle.root().items().and_then(|mut items| items.next()).unwrap();
    assert_eq!(inner.kind(), "a list");
}

#[test]
fn archives_that_torch_does_not_write_are_refused() {
    let scratch = Scratch::new();
    let open = |bytes: &[u8]| Checkpoint::open(&scratch.write("a.pt", bytes)).map(|_| ());
    let good = archive(&[("a/data.pkl", b"\x80\x02N."), ("a/byteorder", b"little")]);
    assert!(open(&good).is_ok());
    let at = good.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    let change = |offset: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at + offset] = value;
        open(&bytes).unwrap_err().to_string()
    };
    assert!(change(8, 1).contains("encrypted"));
    assert!(change(10, 8).contains("compressed"));
    assert!(change(16, 0).contains("checksum"));
    assert!(change(43, 0xff).contains("outside"));
    let refused = |bytes: &[u8]| open(bytes).unwrap_err().to_string();
    assert!(refused(&archive(&[("a/other", b"")])).contains("no data.pkl"));
    assert!(refused(&archive(&[("a/data.pkl", b"N."), ("a/byteorder", b"big")])).contains("big-endian"));
    assert!(refused(&archive(&[("a/data.pkl", b"N."), ("a/x", b""), ("a/x", b"")])).contains("twice"));
    for len in 1..good.len() {
        assert!(open(&good[..len]).is_err(), "{len} of {} bytes", good.len());
    }
}
