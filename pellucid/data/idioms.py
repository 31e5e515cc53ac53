"""The idioms of tiny-python, written as Python with holes.

Holes: `$x $y $z $w $v` variables (the same name throughout a snippet), `$i` a counter, `$f $g` functions, `$T` a class,
`$source $target` file names; and, new each time, `$text` a phrase, `$key` a word, `$n` an integer, `$two $three`
rows of that many integers, `$many` a row of two to six, `$pairs` two to four `key: value` of integers, `$line` one of
LINES, `$aside` one of ASIDES, which leave `$x` alone. Quotes are written double; each string gets its own kind at random.

Variants of an idiom are separated by blank lines. In BLOCKS and FUNCTIONS every fourth one is kept for validation.
"""

LINES = """
print("$text")
print("$text")
print(f"$text {$x}")
print($x)
$f("$text")
$f("$text")
$f("$text")
$f($x)
$x.append("$text")
$x.append($y)
$y = $f("$text")
$y = $f($x)
$y = "$text"
$y = $n
$y = [$two]
$y = [$many]
$y = [$many]
$y = [[$two], [$two]]
$y = [[$two], [$two], [$two]]
$y = [[$three], [$three]]
$x = $x + $n
$x += $n
$y = $x + $n
"""

ASIDES = """
print($z)
$g($z)
$g("$text")
$w = $g($z)
$w = $n
$z += $n
$w = [$two]
print("$text")
"""

BLOCKS = {
    "lines": """
$line
$line

$line
$line
$line

$line
$x = $f($y)
$line

$line
$line
$line
$line
""",
    "lines and a loop": """
$line
for $y in $z:
    $line

$line
while $z:
    $line

$line
$line
for $y in $z:
    $line

$line
while $x:
    $line
    $line

$line
$line
while $z:
    $line

$x = $y
while $x:
    $line

$z = [$two]
for $y in $z:
    $line

$line
for $y in $z:
    $line
    $line
""",
    "strings": """
$f("$text")
$g("$text")
print("$text")

$x = $f("$text")
$g("$text")
$g($x)

$x = "$text"
print($x)
$f("$text")

$x = "$text"
$y = $f("$text")
print($x + $y)

$x = $f("$text", $n)
print("$text")

$x = ["$text", "$text"]
$x.append("$text")
print($x)

$f("$text", "$text")
print("$text")

$x = []
$x.append("$text")
$f("$text")
""",
    "nested lists": """
$x = [[$two], [$two]]
$y = [$many]

$x = [$many]
$y = [[$three], [$three]]

$x = [[$two], [$two], [$two]]
for $y in $x:
    $f($y)

$x = [$two]
$y = [[$two], [$two]]
$f($x, $y)

$x = [[$three], [$three]]
print($x)

$x = [[$two], [$two], [$two]]
$y = [$many]

$x = [[$three]]
$y = [$many]
$f($x, $y)

$x = [[$two]]
$y = [$three]
print($x)
""",
    "loops": """
for $x in $y:
    $line

while $x:
    $line

for $x in $y:
    $line
    $line

while $x:
    $line
    $line

while $x:
    $x = $f($x)

for $x in $y:
    $f("$text")
    print($x)

while $x < $n:
    $x += $n

for $x in $y:
    $z = $f($x)
    print($z)

for $x in [$many]:
    $line

while $x > $n:
    $x = $x - $n
    $line

for $x in $f($y):
    $line

while $x:
    print("$text")
    $x = $g($x)
""",
    "loops in loops": """
for $x in $y:
    for $z in $x:
        $line

for $x in $y:
    while $x:
        $line

while $x:
    for $y in $x:
        $line
    $x = $f($x)

for $x in $y:
    for $z in $x:
        $f($z)
    print("$text")

for $x in $y:
    if $x == $n:
        $line

while True:
    $x = $f($y)
    if $x == $n:
        break

while True:
    for $x in $y:
        $line

for $x in $y:
    if $x:
        $line
    $f($x)

for $x in $y:
    $line
    for $z in $w:
        $line

for $x in $y:
    $line
    for $z in $x:
        $f($z)

while $x:
    $line
    for $z in $x:
        $line

for $x in $y:
    $line
    $line
    for $z in $w:
        $line
""",
    "range and enumerate": """
for $i in range($n):
    $line

for $i, $x in enumerate($y):
    $line

for $i, $x in enumerate($y):
    print($i, $x)

for $i, $x in enumerate($y):
    $f($x)
    $line

for $i in range($n):
    print($i)
    $line

for $i in range($n):
    $f($i)

for $x, $y in enumerate($z):
    $line

for $i in range($n):
    $line
    $f($i)
""",
    "if and else": """
if $x == $n:
    $line
else:
    $line

if $x == $n:
    $line
elif $y == $n:
    $line

if $x:
    $line
elif $y:
    $line
else:
    $line

if $x == $n:
    $line
elif $x == $n:
    $line
else:
    print("$text")

if $x == True:
    $line

if $x == $y:
    $line
$x = $y

if $x > $n:
    $line
else:
    $line

if $x == True:
    $y = True
    $line

if $x:
    $line
elif not $y:
    $line

if $x == $n:
    $line
elif not $x:
    $line
else:
    $line

if not $x:
    $line
else:
    $line

if $x:
    $line
elif not $y:
    $line
else:
    $line
""",
    "truth": """
$x = True
if $x == True:
    $line

$x = True
while $x:
    $x = False

$x = False
while True:
    $line
    break

$x = True
$y = False
if $y == True:
    $line

$x = $f($y)
if $x == True:
    $line

$x = True
$line
$f($x)

$x = True
for $y in $z:
    if $y == $n:
        $x = False

$x = False
if $y == True:
    $x = True
""",
    "ternaries": """
$x = $y if $z else $w

$x = $n if $y else $n
print($x)

$x = "$text" if $y else "$text"
if $x:
    $line

$x = $f($y) if $y else $n
if $x:
    $line

$x = $n if $y else $n
$f($x)

$x = $y if $z else $n
if $x:
    $line

$x = $y
if $z:
    $line

$x = $y if $y else $w
print($x)
""",
    "f-strings": """
print(f"$text {$x}")
print("$text")

$x = "$text"
print(f"$text {$x}")

print(f"{$x} $text")
print("$text")
print(f"{$y} $text")

print("$text")
print(f"$text {$x} and {$y}")

print(f"$text {$x}")
$f($x)

$x = $n
print(f"$text {$x}")

print(f"$text {$x}")
print(f"$text {$y}")

for $x in $y:
    print(f"$text {$x}")
""",
    "sets and strings": """
$x = set()
for $y in $z:
    $x.add($y)

$x = ""
for $y in $z:
    $x += $y

$x = ""
while $y:
    $x += "$text"

$x = set()
for $y in $z:
    $aside
    $x.add($y)

$x = set()
$x.add("$text")
print($x)

$x = ""
$x += "$text"
print($x)

$x = set()
$aside
$x.add($n)
$x.add($n)

$x = ""
for $y in $z:
    $aside
    $x += $y

$x = ""
$aside
$x += $y

$x = set()
$aside
for $y in $z:
    $x.add($y)

$x = ""
$aside
for $y in $z:
    $x += $y

$x = set()
$aside
$x.add("$text")
""",
    "dicts and lists": """
$x = {"$key": $n, "$key": $n}
$y = ["$key", "$key", "$key"]

$x = {"$key": $n, "$key": $n, "$key": $n}
print($x["$key"])

$x = ["$key", "$key"]
for $y in $x:
    $line

$x = ["$key", "$key", "$key"]
$y = {"$key": $n, "$key": $n}

$x = {$n: "$text", $n: "$text"}
$y = [$three]

$x = {}
$x["$key"] = $n
$x["$key"] = "$text"

$x = {$pairs}
$y = [$many]

$x = {$n: "$text", $n: "$text"}
print($x)

$x = {$pairs}
print($x)

$x = {$pairs}
$y = {$pairs}

$x = [$many]
$y = {$pairs}

$x = {$pairs}
for $y in $x:
    $line
""",
    "files": """
with open("$file", "r") as $x:
    $y = $x.read()

with open($source, "r") as $x:
    $y = $x.read()

with open($target, "w") as $x:
    $x.write("$text")

with open("$file", "w") as $x:
    $x.write("$text")

$x = open("$file", "r")
$y = $x.read()
$x.close()

$x = open($source, "r")
$y = $x.read()
$x.close()

$x = open($target, "w")
$x.write("$text")
$x.close()

with open($source, "r") as $x:
    $y = $f($x)

with open($source) as $x:
    for $y in $x:
        $line

$x = open($target, "w")
$x.write($y)

with open($target, "w") as $x:
    $x.write($y)

$x = open($target, "w")
$x.write($f($y))
$x.close()

with open($source, "r") as $x:
    $line

with open("$file", "r") as $x:
    $y = $f($x)

$x = open("$file", "r")
$line

with open($target, "w") as $x:
    $x.write("$text")
    $line
""",
    "swaps": """
$x, $y = $y, $x

$x = $n
$y = $n
$x, $y = $y, $x

if $x > $y:
    $x, $y = $y, $x

if $x:
    $line
    $x, $y = $y, $x

$line
$x, $y = $y, $x

$x, $y = $y, $x
$line

for $z in $w:
    $x, $y = $y, $x

$x, $y = $y, $x
print($x)
""",
    "lambdas": """
$x = lambda $y: $y + $n

$x = lambda $y: $f($y)
print($x($n))

$x = lambda $y, $z: $y + $z
$w = $x($n, $n)

$x = lambda $y: $y * $n
$f($x)

$x = lambda $y: $y == $n
print($x($n))

$x = lambda $y: $n
$z = $x($w)

$x = lambda $y: $y
$f($x)

$x = lambda $y, $z: $y * $z
print($x($n, $n))
""",
}

FUNCTIONS = """
def $f($x, $y):
    $block
    return $x

def $f($x, $y):
    $z = $x + $y
    return $z

def $f($x, $y, $z):
    $line
    return $g($x, $y, $z)

def $f($x):
    $z = $x
    $block
    return $z

def $f():
    $block
    return True

def $f($x):
    if $x == $n:
        return True
    return False

def $f($x, $y):
    if $x > $y:
        return True
    $block

def $f($x, $y):
    if $x:
        $line
        return True
    return False

def $f($x, $y=None):
    $block
    return $y

def $f($x=None, $y=None):
    $line
    return $x

def $f($x, $y=None, $z=None):
    $block
    return $x

def $f($x=None, $y=None, $z=None):
    $block
    return $g($x)

def $f($x, $y, $z, $w):
    $line
    $line
    return $x

def $f($x=None, $y=None, $z=None, $w=None):
    $line
    return $g($w)

class $T:
    def __init__(self, $x, $y):
        self.$x = $x
        self.$y = $y

class $T:
    def __init__(self, $x, $y):
        self.$x = $x
        self.$y = $y

    def $f(self):
        return self.$y

class $T:
    def __init__(self, $x, $y, $z):
        self.$x = $x
        self.$y = $y
        self.$z = $z

class $T:
    def __init__(self, $x, $y, $z, $w):
        self.$x = $x
        self.$y = $y
        self.$z = $z
        self.$w = $w

    def $f(self):
        return self.$x

def $f($x):
    while True:
        $line
        if $x:
            return True

def $f($x, $y):
    for $z in $x:
        if $z == $y:
            return True
    return False

def $f($x, $y=None):
    for $z in $x:
        $line
    return $y

def $f($x):
    $y = []
    for $z in $x:
        $y.append($z)
    return $y

def $f($x):
    $y = []
    while $x:
        $line
    return $y

def $f($x):
    $y = 0
    for $z in $x:
        $y += $z
    return $y

def $f($x, $y, $z, $w, $v):
    $line
    return $x

def $f($x=None, $y=None, $z=None):
    $line
    return $y

def $f($x):
    $line
    return True

def $f($x, $y, $z, $w, $v):
    $block
    return $v

def $f($x):
    while True:
        $line

def $f($x, $y):
    $block
    return True

def $f($x, $y=None, $z=None):
    $line
    return $z

def $f($x, $y):
    while True:
        $block
"""
