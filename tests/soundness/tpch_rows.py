"""Rows and writes for TPC-H's tables: small, and spread so that its 22 queries have answers."""

from __future__ import annotations

import random

REGIONS = ["AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"]
NATIONS_OF = [  # by region
    ["ALGERIA", "ETHIOPIA", "KENYA", "MOROCCO", "MOZAMBIQUE"],
    ["ARGENTINA", "BRAZIL", "CANADA", "PERU", "UNITED STATES"],
    ["INDIA", "INDONESIA", "JAPAN", "CHINA", "VIETNAM"],
    ["FRANCE", "GERMANY", "ROMANIA", "RUSSIA", "UNITED KINGDOM"],
    ["EGYPT", "IRAN", "IRAQ", "JORDAN", "SAUDI ARABIA"],
]
NATIONS = [(name, region) for region, names in enumerate(NATIONS_OF) for name in names]
SEGMENTS = ["AUTOMOBILE", "BUILDING", "FURNITURE", "MACHINERY", "HOUSEHOLD"]
PRIORITIES = ["1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW"]
MODES = ["REG AIR", "AIR", "RAIL", "SHIP", "TRUCK", "MAIL", "FOB"]
TYPES = ["ECONOMY ANODIZED STEEL", "PROMO BURNISHED COPPER", "LARGE BRUSHED BRASS", "MEDIUM POLISHED TIN"]
CONTAINERS = ["SM CASE", "MED BOX", "LG JAR", "JUMBO PKG", "WRAP BOX"]
BRANDS = ["Brand#12", "Brand#23", "Brand#34", "Brand#45"]
COLOURS = ["green", "forest", "almond", "blue"]


class Shop:
    """A generator of INSERT statements for TPC-H's tables, then of writes as in a shop."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"shop {seed}")
        self.orders, self.next_order = list[int](), 1
        self.parts, self.suppliers, self.customers = 40, 12, 30

    def pick(self, options: list[str]) -> str:
        return self.random.choice(options)

    def day(self) -> str:
        return f"'{self.random.randint(1992, 1998)}-{self.random.randint(1, 12):02}-{self.random.randint(1, 28):02}'"

    def money(self, most: int) -> float:
        return round(self.random.uniform(1, most), 2)

    def rows(self) -> list[str]:
        """Return the statements that insert the first rows."""
        made = [f"INSERT INTO region VALUES ({n}, '{name}', 'c')" for n, name in enumerate(REGIONS)]
        for n, (name, region) in enumerate(NATIONS):
            made.append(f"INSERT INTO nation VALUES ({n}, '{name}', {region}, 'c')")
        for n in range(1, self.suppliers + 1):
            values = f"{n}, 'Supplier#{n}', 'a', {self.random.randrange(25)}, '{n}-phone', {self.money(9000)}, 'c'"
            made.append(f"INSERT INTO supplier VALUES ({values})")
        for n in range(1, self.parts + 1):
            name = f"'{self.pick(COLOURS)} {self.pick(COLOURS)}', 'm'"
            kind = f"'{self.pick(BRANDS)}', '{self.pick(TYPES)}', {self.random.randint(1, 50)}"
            rest = f"'{self.pick(CONTAINERS)}', {self.money(2000)}, 'c'"
            made.append(f"INSERT INTO part VALUES ({n}, {name}, {kind}, {rest})")
            for supplier in self.random.sample(range(1, self.suppliers + 1), 2):
                stock = f"{self.random.randint(1, 9999)}, {self.money(1000)}"
                made.append(f"INSERT INTO partsupp VALUES ({n}, {supplier}, {stock}, 'c')")
        for n in range(1, self.customers + 1):
            values = f"{n}, 'Customer#{n}', 'a', {self.random.randrange(25)}, '{self.random.randint(10, 34)}-1'"
            made.append(f"INSERT INTO customer VALUES ({values}, {self.money(9000)}, '{self.pick(SEGMENTS)}', 'c')")
        return made + [sql for _ in range(150) for sql in self.order()]

    def order(self) -> list[str]:
        """Return the statements of a new order with its lines."""
        n, self.next_order = self.next_order, self.next_order + 1
        self.orders.append(n)
        values = f"{n}, {self.random.randint(1, self.customers)}, '{self.pick(['O', 'F', 'P'])}', {self.money(300000)}"
        made = [f"INSERT INTO orders VALUES ({values}, {self.day()}, '{self.pick(PRIORITIES)}', 'Clerk', 0, 'c')"]
        for line in range(1, self.random.randint(2, 5)):
            what = f"{n}, {self.random.randint(1, self.parts)}, {self.random.randint(1, self.suppliers)}, {line}"
            price = f"{self.random.randint(1, 50)}, {self.money(90000)}, 0.0{self.random.randint(0, 9)}, 0.02"
            flags = f"'{self.pick(['R', 'A', 'N'])}', '{self.pick(['O', 'F'])}'"
            days = f"{self.day()}, {self.day()}, {self.day()}"
            how = f"'{self.pick(['DELIVER IN PERSON', 'NONE'])}', '{self.pick(MODES)}', 'c'"
            made.append(f"INSERT INTO lineitem VALUES ({what}, {price}, {flags}, {days}, {how})")
        return made

    def write(self) -> list[str]:
        """Return the statements of a random write."""
        roll, some = self.random.random(), self.random.choice(self.orders)
        if roll < 0.2:
            return self.order()
        if roll < 0.3:
            return [f"DELETE FROM lineitem WHERE l_orderkey = {some}", f"DELETE FROM orders WHERE o_orderkey = {some}"]
        customer = self.random.randint(1, self.customers)
        part = self.random.randint(1, self.parts)
        text = f"'{self.random.random()}'"
        return [
            self.pick(
                [
                    f"UPDATE customer SET c_comment = {text} WHERE c_custkey = {customer}",
                    f"UPDATE customer SET c_acctbal = {self.money(9000)} WHERE c_custkey = {customer}",
                    f"UPDATE orders SET o_orderstatus = '{self.pick(['O', 'F'])}' WHERE o_orderkey = {some}",
                    f"UPDATE orders SET o_clerk = {text} WHERE o_orderkey = {some}",
                    f"UPDATE lineitem SET l_shipdate = {self.day()} WHERE l_orderkey = {some} AND l_linenumber = 1",
                    f"UPDATE lineitem SET l_comment = {text} WHERE l_orderkey = {some}",
                    f"UPDATE partsupp SET ps_availqty = {self.random.randint(1, 9999)} WHERE ps_partkey = {part}",
                    f"UPDATE part SET p_retailprice = {self.money(2000)} WHERE p_partkey = {part}",
                    f"UPDATE supplier SET s_acctbal = {self.money(9000)} WHERE s_suppkey = {part % 12 + 1}",
                    f"UPDATE nation SET n_comment = {text} WHERE n_nationkey = {part % 25}",
                ]
            )
        ]
