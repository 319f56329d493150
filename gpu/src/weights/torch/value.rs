//! Values of a pickle, looked at without being copied. Owner: the checkpoint reader. Invariant: a [`Value`] borrows its
//! pickle, and reading one follows one reference at a time, so cycles and shared values are harmless.

/// A value in the list of a pickle; references are indices of that list.
#[derive(Clone, Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(String),
    Tuple(Vec<usize>),
    List(Vec<usize>),
    Dict(Vec<(usize, usize)>),
    StorageClass(StorageType),
    Storage(StorageNode),
    Tensor(TensorNode),
    OrderedDictType,
    RebuildTensor,
}

/// A file beside the pickle. The key is a reference: a copy for every mention could be made to fill the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct StorageNode {
    pub key: usize,
    pub storage: StorageType,
    pub elements: u64,
}

/// A view of a storage.
#[derive(Clone, Debug)]
pub(super) struct TensorNode {
    pub storage: usize,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub strides: Vec<u64>,
}

impl Node {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Node::None => "nothing",
            Node::Bool(_) => "a boolean",
            Node::Int(_) => "an integer",
            Node::Float(_) => "a number",
            Node::Str(_) => "a string",
            Node::Tuple(_) => "a tuple",
            Node::List(_) => "a list",
            Node::Dict(_) => "a dictionary",
            Node::StorageClass(_) | Node::OrderedDictType => "a class",
            Node::Storage(_) => "a storage",
            Node::Tensor(_) => "a tensor",
            Node::RebuildTensor => "a function",
        }
    }
}

/// Number formats of torch storages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageType {
    /// f32
    Float,
    /// f64
    Double,
    /// IEEE half precision
    Half,
    /// bfloat16
    BFloat16,
    /// i64
    Long,
    /// i32
    Int,
    /// One byte, 0 or 1
    Bool,
    /// u8
    Byte,
}

impl StorageType {
    /// By the name of its class in torch.
    pub(super) fn of_class(name: &str) -> Option<StorageType> {
        Some(match name {
            "FloatStorage" => StorageType::Float,
            "DoubleStorage" => StorageType::Double,
            "HalfStorage" => StorageType::Half,
            "BFloat16Storage" => StorageType::BFloat16,
            "LongStorage" => StorageType::Long,
            "IntStorage" => StorageType::Int,
            "BoolStorage" => StorageType::Bool,
            "ByteStorage" => StorageType::Byte,
            _ => return None,
        })
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            StorageType::Double | StorageType::Long => 8,
            StorageType::Float | StorageType::Int => 4,
            StorageType::Half | StorageType::BFloat16 => 2,
            StorageType::Bool | StorageType::Byte => 1,
        }
    }

    /// The element of these [`Self::size`] little-endian bytes, as f32.
    pub(super) fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (StorageType::Float, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (StorageType::Int, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]) as f32,
            (StorageType::Half, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (StorageType::BFloat16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            (StorageType::Double, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
            (StorageType::Long, &[a, b, c, d, e, f, g, h]) => i64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
            (_, &[byte, ..]) => f32::from(byte),
            (_, []) => 0.0,
        }
    }
}

/// All values of a pickle.
#[derive(Debug)]
pub struct Pickle {
    pub(super) nodes: Vec<Node>,
    pub(super) root: usize,
}

/// A value of a pickle.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    pub(super) pickle: &'a Pickle,
    pub(super) node: usize,
}

impl<'a> Value<'a> {
    pub(super) fn read(self) -> &'a Node {
        &self.pickle.nodes[self.node]
    }

    fn at(self, node: usize) -> Value<'a> {
        Value { pickle: self.pickle, node }
    }

    /// What it is, in words.
    pub fn kind(self) -> &'static str {
        self.read().kind()
    }

    /// The text of a string.
    pub fn as_str(self) -> Option<&'a str> {
        if let Node::Str(text) = self.read() { Some(text) } else { None }
    }

    /// An integer.
    pub fn as_i64(self) -> Option<i64> {
        if let Node::Int(value) = self.read() { Some(*value) } else { None }
    }

    /// An integer or a floating-point number.
    pub fn as_f64(self) -> Option<f64> {
        match self.read() {
            Node::Int(value) => Some(*value as f64),
            Node::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// A boolean.
    pub fn as_bool(self) -> Option<bool> {
        if let Node::Bool(value) = self.read() { Some(*value) } else { None }
    }

    /// The items of a list or tuple.
    pub fn items(self) -> Option<impl Iterator<Item = Value<'a>>> {
        match self.read() {
            Node::List(items) | Node::Tuple(items) => Some(items.iter().map(move |&item| self.at(item))),
            _ => None,
        }
    }

    /// The entries of a dictionary in order.
    pub fn entries(self) -> Option<impl Iterator<Item = (Value<'a>, Value<'a>)>> {
        match self.read() {
            Node::Dict(entries) => Some(entries.iter().map(move |&(key, value)| (self.at(key), self.at(value)))),
            _ => None,
        }
    }

    /// The value of a string key, the last one if it is there twice; a value that is `None` counts as absent.
    pub fn get(self, key: &str) -> Option<Value<'a>> {
        let Node::Dict(entries) = self.read() else { return None };
        let found = entries.iter().rev().find(|(name, _)| self.at(*name).as_str() == Some(key))?;
        Some(self.at(found.1)).filter(|value| !matches!(value.read(), Node::None))
    }

    /// Shape of a tensor, outermost dimension first.
    pub fn shape(self) -> Option<&'a [u64]> {
        if let Node::Tensor(tensor) = self.read() { Some(&tensor.shape) } else { None }
    }
}
